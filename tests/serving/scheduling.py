"""Kinds of KV, and a scheduler over its pools, for tests without a device."""

from collections.abc import Sequence as SequenceOf

from hypothesis import strategies as st

from moejax.arena.kinds import KvKind
from moejax.config import Reach
from moejax_serving.kv_blocks import BlockPool, KvBlock, root_key
from moejax_serving.pages import PagePool
from moejax_serving.sampling_params import SamplingParams
from moejax_serving.scheduler import Scheduler, StepPlan
from moejax_serving.sequence import Sequence


def make_kind(
    *, layers: int = 2, block_size: int = 4, window: int | None = None, chunk: int | None = None
) -> KvKind:
    """A kind of so many layers; nothing here asks which ones."""
    return KvKind(
        layers=tuple(range(layers)),
        token_bytes=4,
        reach=Reach(window=window, chunk=chunk),
        block_size=block_size,
    )


LIMITS = (
    st.just({})
    | st.fixed_dictionaries({"window": st.integers(1, 9)})
    | st.fixed_dictionaries({"chunk": st.integers(1, 9)})
)
# What `make_kind` takes.
KIND_SIZES = st.builds(
    lambda layers, block_size, limit: {"layers": layers, "block_size": block_size, **limit},
    st.integers(1, 3),
    st.integers(1, 5),
    LIMITS,
)


def sees(kind: KvKind, query: int, position: int) -> bool:
    """Whether a token at position `query` attends to the one at `position`, by the definitions."""
    window, chunk = kind.reach.window, kind.reach.chunk
    return (
        position <= query
        and (window is None or query - position < window)
        and (chunk is None or query // chunk == position // chunk)
    )


def make_pool(pages: PagePool, kinds: SequenceOf[KvKind]) -> BlockPool:
    """Of each kind as many blocks as all pages make."""
    return BlockPool(pages, kinds, [1 + pages.num_pages // kind.pages_per_block for kind in kinds])


class Setup:
    """A scheduler over its pools: of one kind that sees everything, or of those that are given."""

    def __init__(
        self,
        *kinds: KvKind,
        num_pages: int | None = None,
        num_blocks: int = 10,
        block_size: int = 4,
        max_num_seqs: int = 3,
        max_prefill_seqs: int = 2,
        max_num_batched_tokens: int = 8,
        max_row_edits: SequenceOf[int] = (100, 100, 100),
        has_cache: bool = True,
    ) -> None:
        """`num_blocks`: of the first kind, where no number of pages is given."""
        self.kinds = kinds or (make_kind(block_size=block_size),)
        self.num_pages = num_blocks * self.kinds[0].pages_per_block
        if num_pages is not None:
            self.num_pages = num_pages
        self.pages = PagePool(1 + self.num_pages)
        self.blocks = make_pool(self.pages, self.kinds)
        self.scheduler = Scheduler(
            self.blocks,
            kinds=self.kinds,
            num_pages=self.num_pages,
            max_num_seqs=max_num_seqs,
            max_prefill_seqs=max_prefill_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_row_edits=max_row_edits[: len(self.kinds)],
            cache_root=root_key("model") if has_cache else None,
        )
        self.names: dict[int, str] = {}

    def add(self, name: str, prompt: int | list[int], max_tokens: int, **options: bool) -> Sequence:
        number = len(self.names)
        # Prompts of a length alone share nothing.
        ids = [1000 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        sequence = Sequence(
            number=number,
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=1000),
            max_tokens=max_tokens,
            seed=0,
            **options,
        )
        self.scheduler.add(sequence)
        self.names[number] = name
        return sequence

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.check()
        return plan

    def step(self) -> StepPlan:
        """A step whose results have come."""
        plan = self.plan()
        self.land(plan)
        return plan

    def run(self) -> None:
        """All that is queued, to its end."""
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    def land(self, plan: StepPlan) -> None:
        """What the engine does with a step's results."""
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_pending -= row.sample
            if row.sample and not sequence.is_finished:
                sequence.output_token_ids.append(7)
                self.scheduler.offer(sequence)
                if len(sequence.output_token_ids) == sequence.max_tokens:
                    self.scheduler.finish(sequence)
        self.check()

    def shown(self, plan: StepPlan) -> list[tuple[str, int, int]]:
        return [(self.names[row.sequence.number], row.start, row.count) for row in plan.rows]

    def check(self) -> None:
        self.scheduler.check()
        self.pages.check()


def held(sequence: Sequence, kind: int = 0) -> list[KvBlock]:
    """The blocks of a kind that a sequence holds."""
    return sequence.kv[kind].blocks


def indices(sequence: Sequence, kind: int = 0) -> list[int]:
    """Their places in its block table."""
    kv = sequence.kv[kind]
    return [*range(kv.first, kv.end)]


def entries(plan: StepPlan, sequence: Sequence, kind: int = 0) -> list[int]:
    """The places in a sequence's block table that a step changes."""
    return [index for other, index, _ in plan.kinds[kind].row_blocks if other is sequence]
