"""The checks of compiled programs find what they look for."""

import types

import jax
import jax.numpy as jnp

import aot

ARENA = jax.ShapeDtypeStruct((64, 8192), jnp.uint32)  # 2 MiB


def write(arena: jax.Array) -> jax.Array:
    return arena.at[3, 5].set(jnp.uint32(7))


def test_a_donated_arena_is_aliased_and_not_copied():
    compiled = aot.compile_for(aot.h200_mesh(), write, ARENA, donate_argnums=0)
    assert aot.copies(compiled) == []
    assert compiled.memory_analysis().alias_size_in_bytes == 2 << 20


def test_an_arena_that_is_kept_is_copied():
    compiled = aot.compile_for(aot.h200_mesh(), write, ARENA)
    assert len(aot.copies(compiled)) == 1
    assert aot.copies(compiled, min_bytes=(2 << 20) + 1) == []


def test_programs_for_several_devices_compile():
    mesh = aot.h200_mesh(num_devices=2)
    halves = jax.NamedSharding(mesh, jax.P("x"))
    rows = jax.ShapeDtypeStruct((4, 128), jnp.float32, sharding=halves)
    compiled = aot.compile_for(mesh, lambda rows: rows.sum(axis=0), rows)
    assert "all-reduce" in compiled.as_text()


def test_passes_can_be_disabled():
    options = {"xla_disable_hlo_passes": "rematerialization"}
    compiled = aot.compile_for(aot.h200_mesh(), write, ARENA, compiler_options=options)
    assert not aot.has_remat(compiled)


def test_a_recomputed_instruction_is_seen_by_its_name():
    def program(text: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(as_text=lambda: text)

    assert aot.has_remat(program("%fusion.5.remat2 = f32[8]{0} fusion(%x), kind=kLoop"))
    assert not aot.has_remat(program("%fusion.5 = f32[8]{0} fusion(%remat), kind=kLoop"))
