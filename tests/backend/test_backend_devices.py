"""One table knows the devices by name: `workbench/common/devices.py`."""

from __future__ import annotations

from workbench.common import devices


def test_what_the_table_says_of_devices():
    assert devices.names() == ("auto", "embedded", "cuda", "host", "null")
    assert [name for name in devices.DEVICES if devices.is_gpu(name)] == ["cuda"]
    assert [name for name in devices.DEVICES if not devices.computes(name)] == ["null"]
    assert devices.computes("auto") and not devices.is_gpu("auto")
    assert not devices.is_gpu("a device that is gone")
    words = devices.in_words()
    assert words.startswith("auto: cuda where there is one, else embedded. embedded: ")
    assert "null" not in words and "null: computes nothing" in devices.in_words(also_idle=True)
