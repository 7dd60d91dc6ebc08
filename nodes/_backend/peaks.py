"""Peak speed of accelerators: dense 16-bit operations a second with accumulation in float32, as makers state it."""

from __future__ import annotations

TERA = 1e12
PEAKS = {
    "A10G": 125, "A10": 125, "A40": 149.7, "A100": 312, "A800": 312, "B100": 1750, "B200": 2250, "GB200": 2500,
    "GH200": 989, "H20": 148, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H800": 989, "L4": 121,
    "L40": 181, "L40S": 362, "MI250X": 383, "MI300X": 1307, "RTX 3090": 71, "RTX 4090": 165, "T4": 65, "V100": 125,
}  # fmt: skip
"""Tera-operations a second, by a word or two of the device's name."""


def peak_of(device: str) -> float | None:
    """Operations a second of a device by its name, such as `NVIDIA H100 80GB HBM3`; None for one that is not listed."""
    words = f" {device.replace('-', ' ')} "
    found = [name for name in PEAKS if f" {name} " in words]
    return PEAKS[max(found, key=len)] * TERA if found else None
