"""The toggle panel: flip switches with the mouse, press Run, see the token before and after.

Its drop-downs are made from the table of toggles, by thread, so a new toggle needs no line here.
They scroll in a box of their own: the test, the baseline, Run and Stop stay above them. The panel
only calls `jupyter.pair.compare`, which anyone can call.
"""

import contextvars
import html
import textwrap
import threading
from collections.abc import Callable
from typing import Any

from ipywidgets import HTML, Accordion, Box, Button, Dropdown, HBox, Image, Layout, Text, VBox

from workbench.benchmarks.workload import Workload, parse
from workbench.common.errors import UsageError, WorkbenchError
from workbench.common.nearest import choices
from workbench.common.tables import prose_html
from workbench.config import FAMILIES, Toggles
from workbench.config.presets import BASELINE, preset_names
from workbench.config.table import THREADS, thread_of
from workbench.engine import exclusive
from workbench.engine.engine import Engine
from workbench.engine.exclusive import Measurement, Stopped, measuring
from workbench.jupyter import pair
from workbench.jupyter.interrupts import heeded
from workbench.report import plots

GIVEN, PINNED = "as given", "pinned"  # baselines that are no presets
MIXED = "mixed"  # the value of a family with toggles that differ, as `Toggles.value_of` says
RUN, RUNNING = "Run", "running"
OF_OLDER = "of an older choice"
TITLE_COLUMNS = 100  # letters that the width of a picture's title holds
FORM_HEIGHT = "26em"  # of the box that the drop-downs scroll in
DIFFERS = "wb-differs"  # the class of a drop-down that differs from the baseline
STYLE = (
    f".{DIFFERS} .widget-label {{font-weight:bold}}"
    f".{DIFFERS} select {{border-color:#0072b2;box-shadow:inset 4px 0 #0072b2}}"
    ".wb-form {border:1px solid #ddd}"
)


class ToggleForm(VBox):
    """A drop-down for each toggle, under the thread that it belongs to. Those of a family are
    folded under a drop-down that sets them all.

    choices: from a toggle to its drop-down.
    families: from a family to the drop-down that stands for it.
    headings: from a thread to its heading, which names the toggles that differ from the baseline.
    """

    def __init__(self, toggles: Toggles, on_change: Callable[[], None]):
        """toggles: the first values of the drop-downs; their type says which drop-downs there are.
        on_change: called after every choice."""
        self._kind = type(toggles)
        self._on_change = on_change
        self.choices = {name: _choice(toggles, name) for name in toggles.names()}
        self.families = {
            family: _choice(toggles, family, [*toggles.values(family), MIXED])
            for family in FAMILIES
        }
        of = {name: family for family in FAMILIES for name in toggles.members(family)}
        self.headings = {thread: HTML() for thread in (*THREADS, "")}
        rows: list[Any] = [HTML(f"<style>{STYLE}</style>")]
        for thread, heading in self.headings.items():
            alone = [c for n, c in self.choices.items() if thread_of(n) == thread and n not in of]
            rows += [heading, _wrapped(alone)]
            for family, choice in self.families.items():
                members = toggles.members(family)
                if thread_of(members[0]) == thread:
                    own = _wrapped([self.choices[name] for name in members])
                    rows += [choice, Accordion([own], titles=(f"{family}_... one by one",))]
                    choice.observe(self._set_family, "value")
        for choice in self.choices.values():
            choice.observe(self._chosen, "value")
        for row in rows:
            row.layout.flex = (
                "0 0 auto"  # else a box that is too low squeezes its rows, and does not scroll
            )
        self.mark(toggles)
        super().__init__(rows, layout=Layout(max_height=FORM_HEIGHT, overflow="auto"))
        self.add_class("wb-form")

    def mark(self, baseline: Toggles) -> None:
        """Marks the drop-downs that differ from `baseline`, and names their toggles in the headings
        of their threads."""
        differ: dict[str, list[str]] = {thread: [] for thread in self.headings}
        for name, choice in (self.choices | self.families).items():
            (choice.add_class if choice.value != baseline.value_of(name) else choice.remove_class)(
                DIFFERS
            )
            if name in self.choices and choice.value != baseline.value_of(name):
                differ[thread_of(name)].append(f"{name}={choice.value}")
        for thread, heading in self.headings.items():
            title = (
                f"{thread.removeprefix('llama.cpp ')}: {THREADS[thread]}" if thread else "others"
            )
            found = f": <i>{html.escape(', '.join(differ[thread]))}</i>" if differ[thread] else ""
            heading.value = f"<b>{title}</b>{found}"

    def toggles(self) -> Toggles:
        """The chosen toggles. Raises UsageError where they clash."""
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


def presets(engine: Engine) -> dict[str, Toggles]:
    """From names of presets to toggles; `best` is resolved for the engine's device, `baseline`
    comes first."""
    found = {name: Toggles.preset(name) for name in preset_names()}
    return {
        name: preset if isinstance(preset, Toggles) else engine.resolve(preset)
        for name, preset in found.items()
    }


class BaselineForm(HBox):
    """The baseline of a panel: a drop-down of presets and of the toggles that the caller gave, and
    a button that pins the toggles as they are now.

    choice: the drop-down.
    pin: the button.
    about: shows the toggles of the chosen baseline.
    """

    def __init__(
        self,
        known: dict[str, Toggles],
        given: Toggles | str | None,
        chosen: Callable[[], Toggles],
        on_change: Callable[[], None],
    ):
        """known: the presets.
        given: the caller's baseline, a preset's name or toggles.
        chosen: returns the form's toggles; called when the button is pressed.
        on_change: called after every choice.

        Raises UsageError for a name that is no preset's.
        """
        first = given if isinstance(given, str) else BASELINE
        if isinstance(given, Toggles):
            first, known = GIVEN, {GIVEN: given} | known
        if first not in known:
            raise UsageError(f"preset {first!r} does not exist; {choices(first, known)}")
        self._known, self._chosen, self._on_change = known, chosen, on_change
        self.choice = Dropdown(
            options=list(known),
            value=first,
            description="baseline",
            tooltip="what the toggles below are compared with",
            style={"description_width": "11em"},
            layout=Layout(width="24em"),
        )
        self.pin = Button(
            description="This one", tooltip="make the toggles below the baseline", icon="thumb-tack"
        )
        self.about = HTML()
        self.choice.observe(self._changed, "value")
        self.pin.on_click(self._pin)
        self._tell()
        super().__init__([self.choice, self.pin, self.about])

    def toggles(self) -> Toggles:
        """The baseline."""
        return self._known[self.choice.value]

    def _pin(self, _: Button) -> None:
        """Pins the form's toggles, unless they clash."""
        try:
            pinned = self._chosen()
        except ValueError:  # they clash: the panel says so already
            return
        self._known = self._known | {PINNED: pinned}
        if self.choice.value == PINNED:
            self._changed({})
        else:
            self.choice.options = list(self._known)
            self.choice.value = PINNED

    def _changed(self, _: dict[str, Any]) -> None:
        self._tell()
        self._on_change()

    def _tell(self) -> None:
        self.about.value = html.escape(str(self.toggles()))


class Panel(VBox):
    """A test, a baseline, Run and Stop, toggles, the speedup line and both timelines; see
    `lab.panel`.

    form: the drop-downs.
    test: the field with the test's name.
    baseline: the toggles that they are compared with.
    code: the toggles as Python, or why they clash.
    button, stop_button: Run, Stop.
    message: what is going on, or what went wrong, in one line.
    speedup: the line of the last run.
    picture: the timelines of the last run.
    result: the last run; None before the first.

    A run is in a thread of its own. Stop, Jupyter's interrupt and `stop()` end it. No other thread
    can use an engine meanwhile (`engine.exclusive`).
    """

    def __init__(
        self, engine: Engine, workload: str, rounds: int, seed: int, baseline: Toggles | str | None
    ):
        """As `lab.panel`."""
        self._engine = engine
        self._rounds, self._seed = rounds, seed
        self._workload = self._checked(workload)
        self.result: pair.Pair | None = None
        self._ended = threading.Event()  # of the last run; an interrupted join would lose it
        self._ended.set()
        self._measurement: Measurement | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self.test = Text(
            value=self._workload.name, description="test", continuous_update=False,
            tooltip="a llama-bench test name: tg16, pp512, tg16@d1024",
            style={"description_width": "11em"}, layout=Layout(width="24em"),
        )  # fmt: skip
        self.test.observe(lambda _: self._changed(), "value")
        self.form = ToggleForm(engine.toggles, self._changed)
        self.baseline = BaselineForm(presets(engine), baseline, self.form.toggles, self._changed)
        self.button = Button(description=RUN, button_style="primary")
        self.button.on_click(self._run)
        self.stop_button = Button(description="Stop", disabled=True)
        self.stop_button.on_click(lambda _: self.stop())
        self.message, self.code, self.speedup = HTML(), HTML(), HTML()
        self.picture = Image(format="png", layout=Layout(display="none", max_width="100%"))
        model = f"{engine.model.name} {engine.model.quant}"
        head = HTML(f"<b>{html.escape(model)}</b>, {html.escape(engine.backend.description)}")
        buttons = HBox([self.button, self.stop_button, self.message])
        super().__init__(
            [head, self.test, self.baseline, buttons, self.code, self.form, self.speedup,
             self.picture]
        )  # fmt: skip
        self._changed()

    # from any thread ----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return not self._ended.is_set()

    def stop(self) -> None:
        """Ends the run after the step under way, and keeps what was measured. A panel without a run
        ends the run of another panel, which the page may have lost."""
        if not self.running:
            exclusive.stop()
            self.stop_button.disabled = True
            return
        self._stopping = True
        self._say("stopping")
        if self._measurement is not None:
            self._measurement.stop()

    def wait(self) -> None:
        """Waits for the end of the run; an interrupt stops the run. If a failure of the workbench
        ended the run, and not a request that a user can mend, it is raised."""
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait()
        if self._error is not None:
            raise self._error

    # the form -----------------------------------------------------------------------------------

    def _checked(self, name: str) -> Workload:
        """The test of that name. Raises UsageError where there is none, or it does not fit."""
        found = parse(name)
        pair.check_pair(self._engine, found, self._rounds, self._seed)
        return found

    def _changed(self) -> None:
        """Shows the chosen toggles, or why they clash, and what differs from the baseline. Marks a
        result that is of another test or of other toggles."""
        fits = True
        self.form.mark(self.baseline.toggles())
        try:
            self._workload = self._checked(self.test.value)
            toggles = self.form.toggles()
            self._engine.resolve(toggles)
            self._engine.resolve(self.baseline.toggles())
            self.code.value = f"<code>{html.escape(as_python(toggles))}</code>"
        except WorkbenchError as error:
            fits, self.code.value = False, _red(error)
        self._fits = fits
        self.button.disabled = self.running or not fits
        self._mark()

    def _mark(self) -> None:
        """Shows whether the last result is of the test and the toggles that are chosen now."""
        if (found := self.result) is None:
            return
        try:
            chosen = parse(self.test.value).name, self.baseline.toggles(), self.form.toggles()
            old = (found.test, found.baseline, found.toggled) != chosen
        except WorkbenchError:
            old = True
        line = html.escape(found.line)
        note = f"<br>{prose_html(found.unresolved)}" if found.unresolved else ""
        self.speedup.value = (
            f"<b>{OF_OLDER}:</b> <i>{line}{note}</i>" if old else f"<b>{line}</b>{note}"
        )

    # the run ------------------------------------------------------------------------------------

    def _run(self, _: Button) -> None:
        """Handles a click. Its thread is Jupyter's, and must be free for the next click."""
        if self.running or not self._fits:
            return
        asked = self._workload, self.baseline.toggles(), self.form.toggles()
        self.button.disabled, self.button.description = True, RUNNING
        self._ended.clear()
        self._stopping, self._error = False, None
        self.stop_button.disabled = False
        self._say("")
        # with the click's context, output and messages of the thread belong to its cell
        target, args = contextvars.copy_context().run, (self._measure, *asked)
        threading.Thread(target=target, args=args, name="panel", daemon=True).start()

    def _measure(self, test: Workload, baseline: Toggles, toggled: Toggles) -> None:
        """Runs in the run's thread. A request that a user can mend is shown in the message, and the
        last result stays."""
        try:
            with measuring("the panel", self._engine) as self._measurement, heeded(self.stop):
                if self._stopping:
                    raise Stopped
                found = pair.compare(
                    self._engine, baseline, toggled, test,
                    rounds=self._rounds, seed=self._seed, progress=self._say,
                )  # fmt: skip
            self.stop_button.disabled = True
            self._say("drawing")
            self._show(found)
            self._say(found.stopped)
        except WorkbenchError as error:
            self.message.value = _red(error)
        except (Stopped, KeyboardInterrupt):
            self._say("stopped before the first round was finished: nothing was measured")
        except Exception as error:
            self._error = error
            self.message.value = _red(f"{type(error).__name__}: {error}; panel.wait() raises it")
        finally:
            self._measurement = None
            self.stop_button.disabled = exclusive.STATE.measurement is None
            self.button.description = RUN
            self.button.disabled = not self._fits
            self._ended.set()
            self.button.disabled = not self._fits  # a toggle that moved just now saw a run

    def _show(self, found: pair.Pair) -> None:
        self.picture.layout.display = "none"
        if found.traces is not None:
            labels = [textwrap.fill(label, TITLE_COLUMNS) for label in found.labels]
            self.picture.value, _ = plots.timeline_pair(*found.traces, labels)._repr_png_()
            self.picture.layout.display = None
        self.result = found
        self._mark()

    def _say(self, text: str) -> None:
        self.message.value = html.escape(text)


def _red(error: Exception | str) -> str:
    line = prose_html(" ".join(str(error).split()))
    return f'<span style="color: #B00020">{line}</span>'


def as_python(toggles: Toggles) -> str:
    """The Python call that makes `toggles`: `wb.Toggles(sync="packed", fuse="on")`."""
    given = ", ".join(f'{name}="{value}"' for name, value in toggles.changed().items())
    return f"wb.Toggles({given})"


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
