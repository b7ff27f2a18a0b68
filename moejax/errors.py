"""The errors that moejax raises on purpose. Each message says what was given and what was needed.

MoejaxError
├── ConfigError        a setting, or a model's configuration, is wrong or not supported
├── CheckpointError    a file or a tensor is missing, broken, or not what the model needs
├── CapacityError      something does not fit into the memory or the lengths that were set
└── RequestError       a request is wrong; the server goes on
"""


class MoejaxError(Exception):
    """Base of all errors that moejax raises on purpose."""


class ConfigError(MoejaxError):
    """A setting, or a model's configuration, is wrong or not supported."""


class CheckpointError(MoejaxError):
    """A file or a tensor is missing, broken, or not what the model needs."""


class CapacityError(MoejaxError):
    """Something does not fit; the message holds the numbers."""


class RequestError(MoejaxError):
    """A request is wrong. `param` names the field at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
