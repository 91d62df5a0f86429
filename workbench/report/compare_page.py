"""Compared runs as a page: the question, the table, a picture, and what differs; opens offline."""

import base64

import jinja2

from workbench.bench.compare import Compared
from workbench.frames import to_html
from workbench.report import plots

CSS = """
body{font:15px/1.45 sans-serif;color:#222;max-width:1100px;margin:24px auto;padding:0 16px}
table{border-collapse:collapse;margin:12px 0}
th,td{padding:4px 10px;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
img{max-width:100%}
"""
TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>{{ css }}</style></head>
<body><h1>{{ title }}</h1>
{{ table | safe }}
{% if picture %}<p><img src="data:image/png;base64,{{ picture }}" alt="{{ alt }}"></p>{% endif %}
{% if unmatched %}<h2>What has no counterpart</h2>{{ unmatched | safe }}{% endif %}
<h2>What to know before believing it</h2>
<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>
</body></html>
"""


def page(found: Compared) -> str:
    """One offline page of HTML; nothing of a run folder reaches it unescaped."""
    first, *others = (str(run.run["run_id"]) for run in found.runs)
    title = f"Is it faster than {first}? {', '.join(others)}"
    summary = found.summary()
    picture, alt = "", ""
    if len(summary):
        png, words = plots.speedup(summary)._repr_png_()  # type: ignore[attr-defined]
        picture, alt = base64.b64encode(png).decode(), words["alt"]
    table, left = found.table(), found.unmatched()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        title=title, css=CSS, picture=picture, alt=alt, lines=found.lines,
        table=to_html(table) if len(table) else "",
        unmatched=to_html(left) if len(left) else "",
    )  # fmt: skip
