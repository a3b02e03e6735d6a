// Quantised matrices for tests: random codes and scales as a checkpoint has them, the numbers they stand for, and their
// tiles by the repack kernels.
#pragma once
#include "test.h"

struct Matrix {
  enum Format { kBf16, kFp8, kFp8Rows, kInt4 } format;
  int n, k;
  std::vector<double> numbers;  // [n][k]
  std::vector<unsigned char> tiles;
  std::vector<float> tile_scales, row_scales;  // [n_tiles * 16] in the order of tiles
  int n_tiles() const { return (n + 15) / 16; }
  const std::vector<float>& scales() const {
    return format == kFp8Rows ? row_scales : tile_scales;
  }  // beside the tiles
};

inline double e4m3(unsigned code) {
  const int e = code >> 3 & 15, m = code & 7;
  const double size = e == 0 ? m / 512.0 : std::ldexp(1 + m / 8.0, e - 7);
  return code & 128 ? -size : size;
}

// `order`: kRowsPlain, or two matrices of n / 2 rows, gate and up. Blocks of FP8 scales are block_rows x block_cols; of
// Int4 1 x 32.
inline Matrix quantised(Matrix::Format format, int n, int k, uint32_t seed, bool gated = false, int block_rows = 32,
                        int block_cols = 64) {
  Matrix m{format, n, k, std::vector<double>((size_t)n * k), {}, {}, {}};
  const int k_blocks = k_blocks_of(k), parts = gated ? 2 : 1, rows = n / parts,
            tiles = gated ? (rows + 7) / 8 : (n + 15) / 16;
  const int bytes = format == Matrix::kInt4 ? 576 : 1024,
            units = format == Matrix::kBf16 ? k_blocks : (k_blocks + 1) / 2;
  m.tiles.assign((size_t)tiles * units * bytes, 0xff);
  if (format == Matrix::kFp8) m.tile_scales = poisoned<float>((size_t)tiles * units * 4);
  if (format == Matrix::kFp8Rows) m.row_scales = std::vector<float>((size_t)tiles * 16, 0.0f);
  for (int part = 0; part < parts; part++) {
    const uint32_t s = seed * 31 + part;
    const int order = !gated ? kRowsPlain : part ? kRowsUp : kRowsGate, padded = gated ? tiles * 8 : tiles * 16;
    double* out = &m.numbers[(size_t)part * rows * k];
    const auto f = numbers((size_t)rows * k, s, 0.1f);
    if (format == Matrix::kBf16) {
      const auto w = rounded(f);
      for (size_t i = 0; i < w.size(); i++) out[i] = value(w[i]);
      RepackParams p{
          w.data(), reinterpret_cast<uint4*>(m.tiles.data()), k, kSourceBf16, order, rows, padded, 0, k, k_blocks, 0,
          nullptr};
      run("repack", dim3((k_blocks * 16 + 255) / 256, padded), 256, p);
      continue;
    }
    const bool four = format == Matrix::kInt4, by_row = format == Matrix::kFp8Rows;
    const int br = four || by_row ? 1 : block_rows,
              bc = four     ? 32
                   : by_row ? k
                            : block_cols,
              stride = four ? (k + 7) / 8 * 4 : k;
    std::vector<unsigned char> codes((size_t)rows * stride);
    const auto bits = numbers(codes.size(), s + 7);
    for (size_t i = 0; i < codes.size(); i++) {
      codes[i] = (unsigned char)(int)((bits[i] + 1) * 127.99f);
      if (!four && (codes[i] & 127) == 127) codes[i] = 1;  // no NaN; subnormal instead
    }
    const int scale_cols = (k + bc - 1) / bc, scale_rows = (rows + br - 1) / br;
    auto scales = numbers((size_t)scale_rows * scale_cols, s + 11);
    std::vector<bf16> scales_bf16;
    for (float& v : scales) {
      v = (0.6f + 0.5f * v) * (four ? 0.01f : 0.002f);
      scales_bf16.push_back(__float2bfloat16(v));
      if (four) v = value(scales_bf16.back());
    }
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < k; c++) {
        const double code =
            four ? (codes[(size_t)r * stride + c / 2] >> 4 * (c % 2) & 15) - 8.0 : e4m3(codes[(size_t)r * stride + c]);
        out[(size_t)r * k + c] = code * scales[(size_t)(r / br) * scale_cols + c / bc];
      }
    if (by_row)
      for (int r = 0; r < rows; r++) m.row_scales[gated ? r / 8 * 16 + r % 8 + part * 8 : r] = scales[r];
    RepackCodesParams p{};
    p.source = codes.data();
    p.scales = four ? (const void*)scales_bf16.data() : scales.data();
    p.weights = m.tiles.data();
    p.tile_scales = format == Matrix::kFp8 ? m.tile_scales.data() : nullptr;
    p.source_stride = stride;
    p.scale_stride = scale_cols;
    p.scale_bf16 = four;
    p.block_rows = br;
    p.block_cols = bc;
    p.order = order;
    p.n_source_rows = rows;
    p.rows = padded;
    p.k = k;
    p.k_blocks = k_blocks;
    run(four ? "repack_int4" : "repack_fp8", dim3(((k_blocks + 1) * 4 + 255) / 256, padded), 256, p);
  }
  return m;
}
