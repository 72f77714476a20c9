"""Devices: where a tensor lives. `Device("cuda:1")` is one object per device, compared by identity or equality
alike."""

from __future__ import annotations

import enum


class DeviceType(enum.Enum):
    """The kinds of devices."""

    CPU = "cpu"
    CUDA = "cuda"
    META = "meta"
    MPS = "mps"
    XPU = "xpu"
    HPU = "hpu"


_INDEXED = {DeviceType.CUDA, DeviceType.XPU, DeviceType.HPU}
_DEVICES: dict[tuple[DeviceType, int | None], Device] = {}


class Device:
    """One device. `devicetype` is a DeviceType; `index` is None where the kind has only one (a CPU's index is
    ignored)."""

    __slots__ = ("devicetype", "index", "name")

    devicetype: DeviceType
    index: int | None
    name: str

    def __new__(cls, kind: str | DeviceType | Device, index: int | None = None) -> Device:
        if isinstance(kind, Device):
            return kind
        if isinstance(kind, str):
            name, _, suffix = kind.partition(":")
            if suffix and index is not None:
                raise ValueError(f"device {kind!r} names an index already, and index={index} names another")
            try:
                kind, index = DeviceType(name), int(suffix) if suffix else index
            except ValueError:
                raise ValueError(
                    f"{name!r} is not a device; valid: {', '.join(t.value for t in DeviceType)}, with ':index' where "
                    "there are several"
                ) from None
        index = (index or 0) if kind in _INDEXED else None
        device = _DEVICES.get((kind, index))
        if device is None:
            device = object.__new__(cls)
            device.devicetype, device.index = kind, index
            device.name = kind.value if index is None else f"{kind.value}:{index}"
            device = _DEVICES.setdefault((kind, index), device)
        return device

    @property
    def type(self) -> str:
        return self.devicetype.value

    def device_str(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f'thunder.devices.Device("{self.name}")'

    def __reduce__(self):
        return Device, (self.name,)


cpu = Device(DeviceType.CPU)
_KNOWN: dict = {}  # foreign device objects already translated


def to_device(x) -> Device | None:
    """The device that `x` names: a Device, a string, an integer (a CUDA index), a torch.device (by its .type and
    .index), or None."""
    if x is None or type(x) is Device:
        return x
    device = _KNOWN.get(x)
    if device is None:
        if isinstance(x, int):
            device = Device(DeviceType.CUDA, x)
        elif isinstance(x, str):
            device = Device(x)
        else:
            device = Device(DeviceType(x.type), x.index)
            if x.index is None and device.devicetype in _INDEXED:
                return device  # "cuda" means the current device at each use: not remembered
        _KNOWN[x] = device
    return device


device_from_string = Device
