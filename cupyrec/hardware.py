"""What a machine has, for `cupyrec plan`: a TOML file of sections with numbers."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from cupyrec import config, errors

__all__ = ["Gpu", "Hardware", "Host", "Link", "Ssd"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU: bytes, bytes a second, and floating-point operations a second by type.

    Parameters
    ----------
    memory : float
        Bytes.
    memory_bandwidth : float
        Bytes a second.
    float32, float16 : float
        Operations a second of matmuls; `float16` is bfloat16's too.

    Examples
    --------
    >>> Gpu(memory=80e9, memory_bandwidth=2e12, float32=19.5e12, float16=312e12).memory
    80000000000.0
    """

    memory: float
    memory_bandwidth: float
    float32: float
    float16: float


@dataclasses.dataclass(frozen=True)
class Host:
    """A host with its CPU: what all ranks on it share.

    Parameters
    ----------
    memory : float
        Bytes.
    memory_bandwidth : float
        Bytes a second, read or written.
    random_lines : float
        Lines of 64 bytes a second from random places of its memory, by all cores.
    cores : float
    float32 : float
        Operations a second of matmuls on all cores.
    ranks : float
        That run on it, a whole number: its GPUs, as a rule.

    Raises
    ------
    ValueError
        `ranks` is none.

    Examples
    --------
    >>> Host(memory=16e9, memory_bandwidth=2e10, random_lines=1e8, cores=2, float32=2e11).ranks
    1
    """

    memory: float
    memory_bandwidth: float
    random_lines: float
    cores: float
    float32: float
    ranks: float = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks % 1:
            raise ValueError(
                f"hardware: host.ranks must be a whole number above 0, got {self.ranks}."
            )


@dataclasses.dataclass(frozen=True)
class Ssd:
    """All SSDs of a host together.

    Parameters
    ----------
    bytes : float
    random_reads : float
        Reads a second of up to 4 KB from random places.
    write_bandwidth : float
        Bytes a second.

    Examples
    --------
    >>> Ssd(bytes=4e12, random_reads=1e6, write_bandwidth=3e9).random_reads
    1000000.0
    """

    bytes: float
    random_reads: float
    write_bandwidth: float


@dataclasses.dataclass(frozen=True)
class Link:
    """What ranks send each other by: bytes a second in one direction.

    Parameters
    ----------
    ranks : float
        From a rank to the others of its host.
    hosts : float
        From a host to other hosts.
    pcie : float
        Between a GPU and its host.

    Examples
    --------
    >>> Link(ranks=450e9, hosts=400e9, pcie=64e9).pcie
    64000000000.0
    """

    ranks: float
    hosts: float
    pcie: float


_SECTIONS = {"host": Host, "gpu": Gpu, "ssd": Ssd, "link": Link}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Hosts, all alike, with what they have.

    Parameters
    ----------
    host : Host
    gpu : Gpu, optional
    ssd : Ssd, optional
    link : Link, optional

    Examples
    --------
    >>> numbers = dict(memory=16e9, memory_bandwidth=2e10, random_lines=1e8, cores=2, float32=2e11)
    >>> Hardware.from_dict({"host": numbers}).host.cores
    2.0
    """

    host: Host
    gpu: Gpu | None = None
    ssd: Ssd | None = None
    link: Link | None = None

    @classmethod
    def load(cls, path: str | os.PathLike) -> Hardware:
        """Return what a TOML file says.

        Raises
        ------
        FileNotFoundError, IsADirectoryError, ValueError, TypeError
            It is no such file.

        Examples
        --------
        >>> import tempfile
        >>> host = Host(memory=16e9, memory_bandwidth=2e10, random_lines=1e8, cores=2, float32=2e11)
        >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write(Hardware(host).to_toml())
        ...     file.flush()
        ...     Hardware.load(file.name).host.memory
        16000000000.0
        """
        return cls.from_dict(config.read(path))

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> Hardware:
        """Return what sections of a TOML file say.

        Raises
        ------
        ValueError, TypeError
            A section or key is missing or unknown, or a value is no positive number.

        Examples
        --------
        >>> Hardware.from_dict({"cpu": {}})
        Traceback (most recent call last):
            ...
        ValueError: hardware: sections must be [host], and any of [gpu], [ssd], [link], got cpu.
        """
        if "host" not in sections or not sections.keys() <= _SECTIONS.keys():
            raise ValueError(
                "hardware: sections must be [host], and any of [gpu], [ssd], [link], "
                f"got {', '.join(sections) or 'none'}."
            )
        return cls(**{name: _section(name, values) for name, values in sections.items()})

    def to_toml(self) -> str:
        """Return this as a TOML file's text.

        Examples
        --------
        >>> host = Host(memory=16e9, memory_bandwidth=2e10, random_lines=1e8, cores=2, float32=2e11)
        >>> print(Hardware(host).to_toml().splitlines()[:2])
        ['[host]', 'memory = 16000000000.0']
        """
        told = {name: getattr(self, name) for name in _SECTIONS if getattr(self, name) is not None}
        return config.to_toml({name: dataclasses.asdict(value) for name, value in told.items()})


def _section(name: str, values: Any) -> Any:
    kind, where = _SECTIONS[name], "hardware"
    if not isinstance(values, dict):
        raise TypeError(f"hardware: '{name}' must be a section [{name}], got {values!r}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = {n for n, field in fields.items() if field.default is dataclasses.MISSING}
    if not needed <= values.keys() <= fields.keys():
        raise ValueError(
            f"hardware: [{name}] must have the keys {', '.join(fields)}, "
            f"got {', '.join(values) or 'none'}."
        )
    for key, value in values.items():
        if not 0 < errors.number(where, f"{name}.{key}", value) < math.inf:
            raise ValueError(f"hardware: {name}.{key} must be above 0, got {value}.")
    return kind(**{key: float(value) for key, value in values.items()})
