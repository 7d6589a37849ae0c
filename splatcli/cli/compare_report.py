"""The report of ``splat compare``: the same facts as JSON, plain lines, tables, a page and a contact sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.cli.tables import Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from splatcli.cli.model import Model
    from splatcli.render.comparison import ViewFigures, ViewImages

#: Views in the table on a terminal, which has 24 lines.
_ROWS = 6
#: Two models of one scene are more alike than this, dB; models in different frames are less.
_UNLIKE_DB = 12.0
#: PSNR in dB of equal images (splatcli/train/image_metrics.py).
_EQUAL_DB = 100.0

#: Views to show, one at a time: figures, the reason for choosing it, and images.
Shown = Iterable[tuple["ViewFigures", str, "ViewImages"]]


@dataclass(frozen=True)
class Report:
    """The report on one or two models. label: of the views. views: at least one."""

    models: Sequence[Model]
    label: str
    views: Sequence[ViewFigures]

    @cached_property
    def means(self) -> dict[str, float]:
        """Return the means of the figures."""
        from splatcli.render.comparison import mean_figures

        return mean_figures(self.views)

    @property
    def is_pair(self) -> bool:
        return len(self.models) == 2

    def facts(self) -> dict[str, Any]:
        """Return the result for --json: figures that do not exist are null."""
        from splatcli.render.comparison import FIGURES

        known = dict(zip("ab", map(_model_facts, self.models), strict=False))
        return {
            "a": known["a"],
            "b": known.get("b"),
            "views_of": self.label,
            **{name: self.means.get(name) for name in FIGURES},
            "views": [
                {"name": view.camera.name, **{name: view.figures.get(name) for name in FIGURES}} for view in self.views
            ],
        }

    def lines(self) -> list[str]:
        """Return the result as plain lines: facts of both models, means, and a line for each view."""
        lines = []
        for side, model in zip("ab", self.models, strict=False):
            facts = _model_facts(model)
            lines.append(f"{side} {facts['path']}")
            lines += [f"{name}_{side} {facts[name]}" for name in ("num_gaussians", "sh_degree", "bytes")]
        lines += [f"{name} {_figure(name, value)}" for name, value in self.means.items()]
        for view in self.views:
            figures = " ".join(f"{name} {_figure(name, value)}" for name, value in view.figures.items())
            lines.append(f"view {view.camera.name} {figures}")
        return lines

    def tables(self, output: Path | None) -> list[Table]:
        """Return the result for a terminal: the models, and the views that are least alike. output: what is written."""
        from splatcli.render.comparison import choose

        heads, *rows = self._model_rows()
        title = f"{len(self.views)} views ({self.label})" + (f": {self._alike()}" if self.is_pair else "")
        title += "" if output is None else f"; see {output}"
        worst = [view for view, _ in choose(self.views, len(self.views))][:_ROWS]
        columns = [name for name in self.means if name.startswith("psnr")]
        names = {"psnr_a": "PSNR of A", "psnr_b": "of B", "psnr_ab": "A against B"}
        shown = [
            [view.camera.name, *(f"{view.figures[name]:.2f}" if name in view.figures else "-" for name in columns)]
            for view in worst
        ]
        rank = "least alike" if self.is_pair else "worst"
        some = f"the {rank} first" if len(worst) == len(self.views) else f"the {len(worst)} {rank}"
        return [Table(rows, heads, title), Table(shown, ("view", *(names[name] for name in columns)), some)]

    def remarks(self) -> list[str]:
        """Return what is suspicious in the figures, with remedies."""
        alike = self.means.get("psnr_ab")
        if alike is None or alike >= _UNLIKE_DB:
            return []
        a, b = (model.path for model in self.models)
        return [
            f"A against B is {alike:.1f} dB only: the models may be of different scenes, or in different frames\n"
            f"  help: splat edit {b} --align-to {a} -o aligned.ply brings one into the frame of the other"
        ]

    def page(self, shown: Shown) -> bytes:
        """Return the page with a slider for each of the views."""
        from splatcli.render.comparison_page import PageView, comparison_page

        pages = [PageView.of(view, images, [reason, *_captions(view)]) for view, reason, images in shown]
        return comparison_page(
            self._title(), self._model_rows(), self._summary(len(pages)), pages, ("a", "b" if self.is_pair else "photo")
        )

    def sheet(self, shown: Shown) -> NDArray[np.uint8]:
        """Return [H, W, 3]: the contact sheet of the views."""
        from splatcli.render.comparison_page import NAMES
        from splatcli.render.sheet import Cell, draw_sheet

        cells, masked, kinds = [], False, dict[str, None]()
        for view, reason, images in shown:
            label = "   ".join(filter(None, [view.camera.name, *_captions(view), reason]))
            cells.append(Cell.of(list(images.images.values()), label))
            masked |= images.masked is not None and not self.is_pair
            kinds |= dict.fromkeys(images.images)
        headings = [NAMES[kind] for kind in kinds]
        return draw_sheet(cells, headings, self._title(), self._summary(len(cells)), masked=masked)

    def _title(self) -> str:
        names = [_name(model.path) for model in self.models]
        return f"A: {names[0]}, B: {names[1]}" if self.is_pair else f"A: {names[0]}, beside the photos"

    def _alike(self) -> str:
        psnr, ssim = self.means["psnr_ab"], self.means["ssim_ab"]
        return "A and B look the same" if psnr >= _EQUAL_DB else f"A against B {psnr:.2f} dB, SSIM {ssim:.4f}"

    def _summary(self, count: int) -> str:
        some = f"{count} of {len(self.views)}" if count < len(self.views) else f"{count}"
        first = f"{some} views ({self.label}), {'the least alike' if self.is_pair else 'the worst'} first"
        return f"{first}. {self._alike()}." if self.is_pair else f"{first}."

    def _model_rows(self) -> list[list[str]]:
        """Return the table of the models; the first row has the heads."""
        known = [_model_facts(model) for model in self.models]
        sides = "ab"[: len(known)]
        rows = [
            ["", *(side.upper() for side in sides)],
            ["model", *(str(facts["path"]) for facts in known)],
            ["format", *(_format(facts) for facts in known)],
            ["Gaussians", *(f"{facts['num_gaussians']:,}" for facts in known)],
            ["SH degree", *(str(facts["sh_degree"]) for facts in known)],
            ["size", *(f"{facts['bytes'] / 1e6:.2f} MB" for facts in known)],
        ]
        for name, title, unit in (("psnr", "PSNR to photos", " dB"), ("ssim", "SSIM to photos", "")):
            values = [self.means.get(f"{name}_{side}") for side in sides]
            if any(value is not None for value in values):
                rows.append([title, *("-" if one is None else f"{_figure(name, one)}{unit}" for one in values)])
        return rows


def _model_facts(model: Model) -> dict[str, Any]:
    from splatcli.formats.registry import bytes_on_disk

    checkpoint = model.checkpoint
    return {
        "path": model.path,
        "format": model.origin,
        "bytes": bytes_on_disk(model.path),
        "num_gaussians": len(model.gaussians),
        "sh_degree": model.gaussians.sh_degree,
        "step": None if checkpoint is None else checkpoint.step,
    }


def _format(facts: dict[str, Any]) -> str:
    """Return the format of a model; the size of a checkpoint includes more than Gaussians."""
    step = facts["step"]
    return str(facts["format"]) if step is None else f"{facts['format']} with optimizer state, step {step:,}"


def _name(path: Path) -> str:
    """Return a short name of a model: run and file of a checkpoint, else the file."""
    return "/".join(path.parts[-3::2]) if path.parent.name == "ckpts" and len(path.parts) > 2 else path.name


def _figure(name: str, value: float) -> str:
    return f"{value:.2f}" if name.startswith("psnr") else f"{value:.4f}"


def _captions(view: ViewFigures) -> list[str]:
    """Return the figures of a view for people."""
    titles = (("a", "A"), ("b", "B"), ("ab", "A against B"))
    return [
        f"{title} {view.figures[f'psnr_{name}']:.2f} dB, SSIM {view.figures[f'ssim_{name}']:.4f}"
        for name, title in titles
        if f"psnr_{name}" in view.figures
    ]
