"""What a panel compares with: a preset, what its caller gave, or toggles pinned from its form."""

import html
from collections.abc import Callable
from typing import Any

from ipywidgets import HTML, Button, Dropdown, HBox, Layout

from workbench.config import BASELINE, Toggles
from workbench.config.presets import preset_names
from workbench.engine.engine import Engine
from workbench.errors import UsageError

GIVEN, PINNED = "as given", "pinned"


def presets(engine: Engine) -> dict[str, Toggles]:
    """Name to toggles, `best` resolved for the engine's device; `baseline` first."""
    found = {name: Toggles.preset(name) for name in preset_names()}
    return {
        name: preset if isinstance(preset, Toggles) else engine.resolve(preset)
        for name, preset in found.items()
    }


class BaselineForm(HBox):
    """A drop-down of baselines, and a button that pins what the toggles are now.

    choice: the drop-down. pin: the button. about: the chosen baseline's toggles.
    """

    def __init__(
        self,
        known: dict[str, Toggles],
        given: Toggles | str | None,
        chosen: Callable[[], Toggles],
        on_change: Callable[[], None],
    ):
        """known: presets. given: of the panel's caller, one of them by name or toggles. chosen: the
        form's toggles, called when the button is pressed. on_change is called after every choice.
        Raises UsageError for a name that is no preset's."""
        first = given if isinstance(given, str) else BASELINE
        if isinstance(given, Toggles):
            first, known = GIVEN, {GIVEN: given} | known
        if first not in known:
            raise UsageError(f"preset {first!r} does not exist; choose one of {', '.join(known)}")
        self._known, self._chosen, self._on_change = known, chosen, on_change
        self.choice = Dropdown(
            options=list(known),
            value=first,
            description="baseline",
            tooltip="what the toggles above are compared with",
            style={"description_width": "11em"},
            layout=Layout(width="24em"),
        )
        self.pin = Button(
            description="This one", tooltip="make the toggles above the baseline", icon="thumb-tack"
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
        """Pins the form's toggles, where they are any."""
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
