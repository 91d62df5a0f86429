"""Which backend keeps a weight or a cache: the host or a device.

A node is computed where its weight or cache is. `program/split.py` assigns the other nodes. So
placement decides where host and device splits alternate. `n_gpu_layers` gives the device the last
layers, and `override_tensor` gives it single weights by name, as llama.cpp's -ngl and -ot do.
"""

from workbench.common import devices
from workbench.common.errors import UsageError
from workbench.config import EngineConfig, parse_override
from workbench.graph.ir import Kind, Node, Tensor
from workbench.model.decoder import Model
from workbench.program.commands import DEVICE, HOST


class Placement:
    """One model on a host and n_devices devices; each device has neighbouring layers.

    Raises UsageError for layers without a device and for devices without layers. Also for an
    override that matches no weight, or that names a device where there is none.
    """

    def __init__(self, model: Model, config: EngineConfig, n_devices: int):
        self._embedding, self._shared = model.embedding, model.rope_freqs
        n_layer, wanted = model.n_layer, config.n_gpu_layers
        if wanted > 0 and not n_devices:
            raise UsageError(
                f"n_gpu_layers={wanted} and the host device has no GPU to put layers on; use 0, or "
                "another device"
            )
        every = wanted < 0 or wanted > n_layer  # as in llama.cpp, more than there are means all
        on_device = (n_layer + 1 if every else wanted) if n_devices else 0
        if 0 < on_device < n_devices:
            raise UsageError(
                f"n_devices={n_devices}: n_gpu_layers={wanted} leaves some without layers; use "
                f"{on_device} at most"
            )
        first = n_layer + 1 - on_device  # the output counts as the layer after the last
        share = max(1, n_layer - first)
        self._layers = [
            DEVICE + (i - first) * n_devices // share if i >= first else HOST
            for i in range(n_layer)
        ]
        self._last = n_devices  # HOST where there is no device
        self._rest = self._last if on_device else HOST
        self._overridden = self._override(model, config)

    def _override(self, model: Model, config: EngineConfig) -> dict[Tensor, int]:
        found: dict[Tensor, int] = {}
        for text in config.override_tensor:
            pattern, on_host = parse_override(text)
            if not on_host and not self._last:
                raise UsageError(
                    f"override_tensor {text!r}: the host device has no GPU to put weights on; name "
                    f"{devices.HOST}, or another device"
                )
            taken = (model.embedding, model.rope_freqs)  # these have backends of their own
            matching = [t for t in model.weights if t not in taken and pattern.search(t.name)]
            if not matching and any(t is not None and pattern.search(t.name) for t in taken):
                raise UsageError(
                    f"override_tensor {text!r}: token_embd and rope_freqs have backends of "
                    "their own; name other weights"
                )
            if not matching:
                raise UsageError(
                    f"override_tensor {text!r} matches no weight of {model.path}; names are like "
                    "blk.0.ffn_gate.weight (`workbench model inspect`)"
                )
            for t in matching:
                layer = layer_of(t)
                own = HOST if layer is None else self._layers[layer]
                found.setdefault(t, HOST if on_host else own or self._last)
        return found

    def of_weight(self, weight: Tensor) -> int:
        """The backend that multiplies by a weight; a tied output is the embedding."""
        if weight in self._overridden:
            return self._overridden[weight]
        layer = layer_of(weight)
        return self._rest if layer is None else self._layers[layer]

    def keepers(self, weight: Tensor, output: Tensor) -> list[int]:
        """The backends that keep a weight. The host keeps the embedding, to look tokens up. A tied
        output is also on the backend that multiplies by it. The factors of RoPE are on every
        backend that has a layer."""
        if weight is self._shared:
            return sorted(set(self._layers))
        if weight is not self._embedding:
            return [self.of_weight(weight)]
        return sorted({HOST, self.of_weight(weight)}) if output is weight else [HOST]

    def of_cache(self, layer: int) -> int:
        """The backend that keeps K and V of a layer."""
        return self._layers[layer]

    def fixed(self, node: Node) -> int | None:
        """The backend that a node's weight or cache ties it to, if any.

        A norm is computed with its layer, as in llama.cpp. Elsewhere its result would be a second
        tensor to copy."""
        if node.op == "rms_norm" and node.layer >= 0:
            return self._layers[node.layer]
        for t in node.inputs:
            if t.kind == Kind.CACHE:
                return self.of_cache(node.layer)
            if t.kind == Kind.WEIGHT and t is not self._shared:
                looks_up = node.op == "get_rows" and node.inputs[1].kind == Kind.INPUT
                return HOST if looks_up else self.of_weight(t)
        return None


def layer_of(weight: Tensor) -> int | None:
    """The layer in a weight's name, `blk.3.attn_q.weight`; None outside the layers."""
    head, _, rest = weight.name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if head == "blk" and number.isdigit() else None
