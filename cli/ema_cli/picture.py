"""Pictures of memory over time, written as SVG by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

GI = 2**30
PANEL_WIDTH, PANEL_HEIGHT = 300, 74
GAP_X, GAP_Y = 46, 14
LEFT, TOP, BOTTOM = 96, 84, 64


@dataclass(frozen=True, slots=True)
class Layer:
    """One state of memory: what it is called and its colour."""

    name: str
    colour: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Memory of one GPU in one run: a value in bytes for every layer, from the bottom up, at every moment."""

    moments: Sequence[float]
    """Seconds."""
    values: Sequence[Sequence[int]]
    """By moment, then by layer."""
    limit: int
    """Bytes that the GPU has; drawn as a line."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels in rows (one a GPU) and columns (one a run)."""

    title: str
    subtitle: str
    columns: Sequence[str]
    rows: Sequence[str]
    layers: Sequence[Layer]
    panels: Sequence[Sequence[Panel]]
    """By row, then by column."""
    duration: float
    """Seconds on every horizontal axis."""
    floor: int
    """Bytes at which vertical axes begin: constant memory below it is cut off."""
    top: int
    """Bytes at which vertical axes end: what is above it is cut off."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Bytes on a vertical axis."""

    floor: int
    top: int

    def y(self, value: int, panel: int) -> str:
        part = min(1.0, max(0.0, (value - self.floor) / (self.top - self.floor)))
        return f"{panel + PANEL_HEIGHT * (1 - part):.1f}"


def svg(picture: Picture) -> str:
    """The picture as an SVG document. All panels of it share their axes."""
    width = LEFT + len(picture.columns) * (PANEL_WIDTH + GAP_X)
    height = TOP + len(picture.rows) * (PANEL_HEIGHT + GAP_Y) + BOTTOM
    scale = _Scale(picture.floor, picture.top)
    bottom = height - BOTTOM + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        'font-family="system-ui, sans-serif" font-size="11" fill="#222" role="img">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(picture.title)}</text>',
        f'<text x="{LEFT}" y="42" fill="#555">{escape(picture.subtitle)}</text>',
        *_legend(picture.layers, 58),
    ]
    for column, name in enumerate(picture.columns):
        x = LEFT + column * (PANEL_WIDTH + GAP_X)
        parts.append(f'<text x="{x}" y="{TOP - 4}" font-weight="600">{escape(name)}</text>')
        parts += _time_axis(x, bottom, picture.duration)
    for row, name in enumerate(picture.rows):
        y = TOP + row * (PANEL_HEIGHT + GAP_Y)
        parts.append(f'<text x="10" y="{y + PANEL_HEIGHT / 2 + 4}" font-weight="600">{escape(name)}</text>')
        for column, panel in enumerate(picture.panels[row]):
            x = LEFT + column * (PANEL_WIDTH + GAP_X)
            parts += _memory_axis(x, y, scale)
            parts += _areas(panel, picture, x, y, scale)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _legend(layers: Sequence[Layer], y: int) -> list[str]:
    parts, x = [], LEFT
    for layer in layers:
        parts.append(f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{layer.colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{escape(layer.name)}</text>')
        x += 34 + 6 * len(layer.name)
    parts.append(f'<path d="M{x} {y - 4}h14" stroke="#c00" stroke-dasharray="3 2"/>')
    parts.append(f'<text x="{x + 19}" y="{y}">the GPU\'s memory</text>')
    return parts


def _time_axis(x: int, y: int, duration: float) -> list[str]:
    unit, scale = ("min", 60.0) if duration >= 300 else ("s", 1.0)
    ticks = [
        f'<text x="{x + PANEL_WIDTH * part / 4:.0f}" y="{y + 6}" text-anchor="middle" fill="#555">'
        f"{duration * part / 4 / scale:.3g}</text>"
        for part in range(5)
    ]
    middle = x + PANEL_WIDTH / 2
    return [*ticks, f'<text x="{middle}" y="{y + 22}" text-anchor="middle" fill="#555">time ({unit})</text>']


def _memory_axis(x: int, y: int, scale: _Scale) -> list[str]:
    return [
        f'<path d="M{x} {y}v{PANEL_HEIGHT}h{PANEL_WIDTH}" fill="none" stroke="#999"/>',
        *(
            f'<text x="{x - 4}" y="{float(scale.y(value, y)) + 4:.0f}" text-anchor="end" fill="#555" font-size="9">'
            f"{value / GI:.3g}{' GiB' if value == scale.top else ''}</text>"
            for value in (scale.floor, (scale.floor + scale.top) // 2, scale.top)
        ),
    ]


def _areas(panel: Panel, picture: Picture, x: int, y: int, scale: _Scale) -> list[str]:
    across = [f"{x + PANEL_WIDTH * moment / picture.duration:.1f}" for moment in panel.moments]
    floor = [0] * len(panel.moments)
    parts: list[str] = []
    for index, layer in enumerate(picture.layers):
        roof = [low + moment[index] for low, moment in zip(floor, panel.values, strict=True)]
        if roof != floor:
            there = [f"{a},{scale.y(value, y)}" for a, value in zip(across, roof, strict=True)]
            back = [f"{a},{scale.y(value, y)}" for a, value in zip(across, floor, strict=True)]
            parts.append(f'<polygon fill="{layer.colour}" points="{" ".join(there + back[::-1])}"/>')
        floor = roof
    if panel.limit <= scale.top:
        line = scale.y(panel.limit, y)
        parts.append(f'<path d="M{x} {line}h{PANEL_WIDTH}" stroke="#c00" stroke-dasharray="3 2"/>')
    return parts
