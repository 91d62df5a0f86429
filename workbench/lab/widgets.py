"""The toggle panel: flip switches with the mouse, press Run, see the token before and after.

Its drop-downs are made of the fields of `Toggles` and their metadata, so a new toggle needs no line
here. All it does is `lab.pair.compare`, which is there for those who would rather write it down.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from typing import Any

from ipywidgets import HTML, Accordion, Box, Button, Dropdown, HBox, Image, Layout, VBox
from matplotlib.figure import Figure

from workbench.bench.workload import parse
from workbench.config import FAMILIES, Toggles, folded
from workbench.engine.engine import Engine
from workbench.errors import WorkbenchError
from workbench.lab import pair, said
from workbench.report import plots

MIXED = "mixed"  # what a family is at whose toggles differ; `Toggles.value_of` says so, too
RUN, RUNNING = "Run", "running"


class ToggleForm(VBox):
    """A drop-down per toggle; those of a family folded away behind one that sets them all.

    choices: toggle -> its drop-down. families: family -> the drop-down that stands for it.
    """

    def __init__(self, toggles: Toggles, on_change: Callable[[], None]):
        """toggles: where the drop-downs begin; their type says which there are. on_change is called
        after every choice."""
        self._kind = type(toggles)
        self._on_change = on_change
        self.choices = {name: _choice(toggles, name) for name in toggles.names()}
        self.families = {
            family: _choice(toggles, family, [*toggles.values(family), MIXED])
            for family in FAMILIES
        }
        of = {name: family for family in FAMILIES for name in toggles.members(family)}
        rows: list[Any] = [_wrapped([c for name, c in self.choices.items() if name not in of])]
        for family, choice in self.families.items():
            members = [self.choices[name] for name in toggles.members(family)]
            one_by_one = Accordion([_wrapped(members)], titles=(f"{family}_... one by one",))
            rows += [choice, one_by_one]
            choice.observe(self._set_family, "value")
        for choice in self.choices.values():
            choice.observe(self._chosen, "value")
        super().__init__(rows)

    def toggles(self) -> Toggles:
        """What is chosen. Raises UsageError for toggles that clash."""
        return self._kind(**{name: choice.value for name, choice in self.choices.items()})

    def _set_family(self, change: dict[str, Any]) -> None:
        family = change["owner"].description
        if change["new"] == MIXED:  # is seen, and cannot be chosen
            change["owner"].value = self._common(family)
            return
        for name in self._kind.members(family):
            self.choices[name].value = change["new"]

    def _chosen(self, change: dict[str, Any]) -> None:
        name = change["owner"].description
        for family, choice in self.families.items():
            if name in self._kind.members(family):
                choice.value = self._common(family)
        self._on_change()

    def _common(self, family: str) -> str:
        found = {self.choices[name].value for name in self._kind.members(family)}
        return found.pop() if len(found) == 1 else MIXED


class Panel(VBox):
    """Toggles, a Run button, the speedup line, and the timelines of both sides; see `lab.panel`.

    form: the drop-downs. button: Run. message: what is going on, or what is wrong, in one line.
    code: the toggles as Python. speedup: the line of the last run. picture: its timelines.
    result: the last run, None before the first.
    """

    def __init__(self, engine: Engine, workload: str, rounds: int, seed: int, baseline: Toggles):
        """As `lab.panel`."""
        self._engine = engine
        self._workload = parse(workload)
        self._rounds, self._seed, self._baseline = rounds, seed, baseline
        pair.check(engine, self._workload, rounds, seed)
        self.result: pair.Pair | None = None
        self.form = ToggleForm(engine.toggles, self._changed)
        self.button = Button(description=RUN, button_style="primary")
        self.button.on_click(self._run)
        self.message, self.code, self.speedup = HTML(), HTML(), HTML()
        self.picture = Image(format="png", layout=Layout(display="none", max_width="100%"))
        model = f"{engine.model.name} {engine.model.quant}"
        head = HTML(
            f"<b>{html.escape(model)}</b>, {html.escape(engine.backend.description)}<br>"
            f"{self._workload.name} against: {html.escape(said(baseline))}"
        )
        super().__init__(
            [head, self.form, self.code, HBox([self.button, self.message]), self.speedup,
             self.picture]
        )  # fmt: skip
        self._changed()

    def _changed(self) -> None:
        """Shows the toggles chosen, or at once why they cannot be."""
        try:
            toggles = self.form.toggles()
        except WorkbenchError as error:
            self._refuse(error)
            return
        self.message.value = ""
        self.code.value = f"<code>{html.escape(as_python(toggles))}</code>"

    def _run(self, _: Button) -> None:
        """The click. What a user can mend is said in the message; the last result stays then."""
        self.button.disabled, self.button.description = True, RUNNING
        try:
            toggles = self.form.toggles()
            found = pair.compare(
                self._engine, self._baseline, toggles, self._workload,
                rounds=self._rounds, seed=self._seed, progress=self._say,
            )  # fmt: skip
            self._show(found)
            self._say("")
        except WorkbenchError as error:
            self._refuse(error)
        except KeyboardInterrupt:  # no cell is running that could end with it
            self._say(f"interrupted; press {RUN} to begin again")
        finally:
            self.button.disabled, self.button.description = False, RUN

    def _show(self, found: pair.Pair) -> None:
        figure = plots.timeline_pair(found.before, found.after, found.labels)
        self.picture.value = _png(figure)
        self.picture.layout.display = None
        self.speedup.value = f"<b>{html.escape(found.line)}</b>"
        self.result = found

    def _say(self, text: str) -> None:
        self.message.value = html.escape(text)

    def _refuse(self, error: WorkbenchError) -> None:
        line = html.escape(" ".join(str(error).split()))
        self.message.value = f'<span style="color: #B00020">{line}</span>'


def as_python(toggles: Toggles) -> str:
    """The call that makes `toggles`: `wb.Toggles(sync="packed").switched("fuse", "on")`."""
    off = type(toggles)()
    changed = {k: v for k, v in folded(toggles.to_dict()).items() if v != off.value_of(k)}
    own = [f'{name}="{value}"' for name, value in changed.items() if name not in FAMILIES]
    switched = [f'.switched("{k}", "{v}")' for k, v in changed.items() if k in FAMILIES]
    return f"wb.Toggles({', '.join(own)})" + "".join(switched)


def _choice(toggles: Toggles, name: str, values: list[str] | None = None) -> Dropdown:
    return Dropdown(
        options=values or toggles.values(name),
        value=toggles.value_of(name),
        description=name,
        tooltip=f"the answer: {toggles.answer_class(name)}",
        style={"description_width": "11em"},
        layout=Layout(width="24em"),
    )


def _wrapped(choices: list[Dropdown]) -> Box:
    return Box(choices, layout=Layout(flex_flow="row wrap"))


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()
