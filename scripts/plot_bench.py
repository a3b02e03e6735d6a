#!/usr/bin/env python3
"""Pictures of `volley bench --json`: milliseconds a token by depth, and what a wide verify pass costs against a pass of one row.
  volley bench -d 0,1024,4096,16384 --widths 1,2,3,4,5,6,7,8,16 --json > 8b.jsonl      (scripts/gpu_check.sh with ONLY=plots does it for three models)
  scripts/plot_bench.py 8b.jsonl 1b.jsonl ... --out docs
writes docs/latency_by_depth.svg and docs/cost_by_width.svg. Lines that are no JSON objects are skipped, so that logs will do. Needs Python 3.9, nothing else.
"""
import argparse
import json
import math
import pathlib
import sys

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 200, 44, 56
# Okabe and Ito's colours, which most eyes can tell apart; dark grey for text, so that both light and dark pages carry it.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
INK, GRID = "#6b7280", "#9ca3af"


def rows(paths):
    """All rows of the files: by model and depth the median of a token; by model and depth the passes of each width."""
    tokens, widths, device, commit = {}, {}, set(), set()
    for path in paths:
        for line in pathlib.Path(path).read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "token_ms" in row:
                tokens.setdefault(row["model"], {})[row["depth"]] = row["token_ms"]["p50"]
                device.add(row["device"])
                commit.add(row["commit"])
            elif "against_width_1" in row:
                widths.setdefault((row["model"], row["depth"]), {})[row["width"]] = row["against_width_1"]
    if not tokens:
        sys.exit(f"error: {', '.join(map(str, paths))}: expected rows of volley bench --json, found none")
    return tokens, widths, ", ".join(sorted(device)), ", ".join(sorted(commit))


def ticks(low, high, n=6):
    """Round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / n))
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= n)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def picture(title, below, x_label, y_label, x_ticks, y_range, lines):
    """An SVG. `lines`: (name, colour, dashed, [(x, y)]) with x as a position in x_ticks, [(position, label)]; y_range (low, high)."""
    x_low, x_high = x_ticks[0][0], x_ticks[-1][0]
    y_low, y_high = y_range
    x_at = lambda x: LEFT + (x - x_low) / (x_high - x_low or 1) * (WIDTH - LEFT - RIGHT)
    y_at = lambda y: HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
    text = lambda x, y, what, anchor="middle", size=12, more="": (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"{more}>{what}</text>'
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" role="img">',
        f"<title>{title}</title>",
        text(LEFT, 20, title, "start", 15, ' font-weight="bold"'),
        text(LEFT, 36, below, "start", 11),
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 14, x_label),
        text(16, TOP + (HEIGHT - TOP - BOTTOM) / 2, y_label, more=f' transform="rotate(-90 16 {TOP + (HEIGHT - TOP - BOTTOM) / 2:.1f})"'),
    ]
    for y in ticks(y_low, y_high):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}" stroke="{GRID}" stroke-opacity="0.4"/>')
        out.append(text(LEFT - 8, y_at(y) + 4, f"{y:g}", "end"))
    for x, label in x_ticks:
        out.append(text(x_at(x), HEIGHT - BOTTOM + 18, label))
    taken = []
    for name, colour, dashed, points in lines:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out += [f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{colour}"><title>{name}: {y:.4g}</title></circle>' for x, y in points]
        # Names beside the ends of the lines, none upon another.
        at = y_at(points[-1][1]) + 4
        while any(abs(at - other) < 14 for other in taken):
            at += 1
        taken.append(at)
        out.append(f'<text x="{WIDTH - RIGHT + 10}" y="{at:.1f}" font-size="12" fill="{colour}">{name}</text>')
    return "\n".join(out + ["</svg>", ""])


def by_depth(tokens, device):
    depths = sorted({depth for of_model in tokens.values() for depth in of_model})
    lines = []
    for i, (model, of_model) in enumerate(tokens.items()):
        lines.append((model, COLOURS[i % len(COLOURS)], False, [(depths.index(d), ms) for d, ms in sorted(of_model.items())]))
    lines.sort(key=lambda line: line[3][-1][1])
    high = max(ms for of_model in tokens.values() for ms in of_model.values())
    places = [(i, f"{depth:,}") for i, depth in enumerate(depths)]
    return picture("Time of a token by depth", device, "tokens in the cache before", "ms a token, median", places, (0, 1.08 * high), lines)


def by_width(widths, device):
    all_widths = sorted({width for of_model in widths.values() for width in of_model})
    depths = {}
    for model, depth in widths:
        depths.setdefault(model, []).append(depth)
    lines = []
    for i, (model, of_model) in enumerate(depths.items()):
        for depth in sorted({min(of_model), max(of_model)}):
            points = sorted(widths[model, depth].items())
            lines.append((f"{model}, {depth:,}", COLOURS[i % len(COLOURS)], depth != min(of_model), points))
    lines.sort(key=lambda line: line[3][-1][1])
    high = max(y for line in lines for _, y in line[3])
    places = [(width, str(width)) for width in all_widths]
    below = f"{device}; behind each name the tokens in the cache"
    return picture("Cost of a verify pass by rows", below, "rows verified together", "time against one row", places, (min(1, 0.98 * min(y for line in lines for _, y in line[3])), 1.02 * high), lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", default="docs", type=pathlib.Path)
    args = parser.parse_args()
    tokens, widths, device, commit = rows(args.files)
    (args.out / "latency_by_depth.svg").write_text(by_depth(tokens, device))
    if widths:
        (args.out / "cost_by_width.svg").write_text(by_width(widths, device))
    print(f"{len(tokens)} models at {len({d for m in tokens.values() for d in m})} depths, {len(widths)} lists of widths, on {device}, commit {commit}")


if __name__ == "__main__":
    main()
