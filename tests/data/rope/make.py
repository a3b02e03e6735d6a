"""Rope tables by Python floats (f64), from the formulas in the papers and not from our code: writes frequencies.json beside itself.
linear: positions divided by the factor. llama3: by wavelength, as published with Llama 3.1. yarn: arXiv 2309.00071, section 3.
Run: python3 make.py
"""
import json
import math
import pathlib


def plain(theta, dim):
    return [1.0 / theta ** (2 * i / dim) for i in range(dim // 2)]


def linear(theta, dim, factor):
    return [f / factor for f in plain(theta, dim)]


def llama3(theta, dim, factor, low, high, original):
    table = []
    for f in plain(theta, dim):
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            table.append(f)
        elif wavelength > original / low:
            table.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            table.append((1 - smooth) * f / factor + smooth * f)
    return table


def yarn(theta, dim, factor, original, beta_fast=32, beta_slow=1, truncate=True):
    def dimension(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    table = []
    for i, f in enumerate(plain(theta, dim)):
        gamma = 1 - min(max((i - low) / (high - low), 0), 1)
        table.append((1 - gamma) * f / factor + gamma * f)
    return table


def magnitude(factor, mscale=1.0):
    return 0.1 * mscale * math.log(factor) + 1.0


L3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = [
    # name, theta, dim, scaling as in config.json but for its kind, table, factor on cos and sin
    ("default", 1e5, 64, {}, plain(1e5, 64), 1.0),
    ("linear", 1e4, 16, {"factor": 4.0}, linear(1e4, 16, 4.0), 1.0),
    ("llama3", 1e4, 16, L3 | {"original_max_position_embeddings": 32}, llama3(1e4, 16, 8.0, 1.0, 4.0, 32), 1.0),
    ("llama3", 5e5, 128, L3 | {"original_max_position_embeddings": 8192}, llama3(5e5, 128, 8.0, 1.0, 4.0, 8192), 1.0),
    ("yarn", 1e4, 16, {"factor": 8.0, "original_max_position_embeddings": 32}, yarn(1e4, 16, 8.0, 32), magnitude(8.0)),
    ("yarn", 1e6, 128, {"factor": 4.0, "original_max_position_embeddings": 32768}, yarn(1e6, 128, 4.0, 32768), magnitude(4.0)),
    ("yarn", 1e6, 128, {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.25},
     yarn(1e6, 128, 4.0, 32768), 1.25),
    ("yarn", 5e4, 64, {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
                       "mscale_all_dim": 1.0}, yarn(5e4, 64, 64.0, 4096, 1, 1), 1.0),
    ("yarn", 1e4, 64, {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
     yarn(1e4, 64, 40.0, 4096), magnitude(40.0, 0.707) / magnitude(40.0, 1.0)),
    ("yarn", 15e4, 64, {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
     yarn(15e4, 64, 32.0, 4096, truncate=False), magnitude(32.0)),
]

fields = ["kind", "theta", "dim", "scaling", "frequencies", "attention_factor"]
path = pathlib.Path(__file__).with_name("frequencies.json")
path.write_text("[\n" + ",\n".join(json.dumps(dict(zip(fields, case))) for case in CASES) + "\n]\n")
