#!/usr/bin/env python3
"""Writes the licences of the crates that are in the binary to a file, for a release, from `cargo metadata` and the crates' own files; nothing is downloaded.
  scripts/licences.py FILE
Whether they may be used is asked by scripts/deny.sh. Needs Python 3.9 and cargo, nothing else.
"""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXTS = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|UNLICENSE|COPYRIGHT)", re.IGNORECASE)


def crates():
    """Packages that the binary is linked from, build scripts and tests left out."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]
    data = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    packages = {package["id"]: package for package in data["packages"]}
    edges = {node["id"]: [d["pkg"] for d in node["deps"] if any(k["kind"] is None for k in d["dep_kinds"])] for node in data["resolve"]["nodes"]}
    root = data["resolve"]["root"]
    found, todo = set(), [root]
    while todo:
        for dependency in edges[todo.pop()]:
            # A macro runs in the compiler.
            kinds = {kind for target in packages[dependency]["targets"] for kind in target["kind"]}
            if dependency not in found and "proc-macro" not in kinds:
                found.add(dependency)
                todo.append(dependency)
    return sorted((packages[i] for i in found), key=lambda package: (package["name"], package["version"]))


def texts(package):
    folder = pathlib.Path(package["manifest_path"]).parent
    named = [folder / package["license_file"]] if package["license_file"] else []
    return named or sorted(path for path in folder.iterdir() if path.is_file() and TEXTS.match(path.name))


def main():
    notices, without = {}, []  # notices: text, crates that have it
    found = crates()
    for package in found:
        name = f"{package['name']} {package['version']}"
        files = texts(package)
        if not files:
            without.append(name)  # the licence's name and the repository stand for it
        for body in [path.read_text(errors="replace").strip() for path in files] or [f"(no text in the crate; {package['repository']})"]:
            notices.setdefault(body, []).append(f"{name} ({package['license']})")
    head = (
        "Volley is under the Apache License 2.0 (LICENSE). These crates are in its executable, and Rust's standard library (MIT OR Apache-2.0,\n"
        "copyright The Rust Project Developers), each under its own licence.\n"
    )
    parts = [f"\n{'=' * 100}\n{', '.join(names)}\n\n{body}\n" for body, names in notices.items()]
    pathlib.Path(sys.argv[1]).write_text(head + "".join(parts))
    print(f"licences: texts of {len(found)} crates; without a text of their own: {', '.join(without) or 'none'}")


if __name__ == "__main__":
    main()
