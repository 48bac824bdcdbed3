// The instructions of Intel's matrix unit (AMX) in plain C++, so that a machine without one can run the kernel's path for
// it: python -m tests.kernels.attention.cpu_cases --flags "-include tests/kernels/attention/emulated_tiles.h"
// It needs a CPU with AVX-512 BF16.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace emulated {
struct Config {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
inline thread_local Config config;
inline thread_local bool ready = false;
alignas(64) inline thread_local char tiles[8][16][64];
inline void need(bool there, const char* what) {
  if (!there) { std::fprintf(stderr, "tiles: %s\n", what); std::abort(); }
}
inline void load_config(const void* from) {
  std::memcpy(&config, from, 64);
  need(config.palette == 1, "palette");
  for (int t = 0; t < 8; t++) need(config.bytes[t] == 64 && config.rows[t] == 16, "shape");
  std::memset(tiles, 0, sizeof tiles);
  ready = true;
}
inline void load(int t, const void* from, int64_t step) {
  need(ready, "not configured");
  for (int r = 0; r < 16; r++) std::memcpy(tiles[t][r], (const char*)from + r * step, 64);
}
inline void store(int t, void* to, int64_t step) {
  need(ready, "not configured");
  for (int r = 0; r < 16; r++) std::memcpy((char*)to + r * step, tiles[t][r], 64);
}
inline float wide(uint16_t x) { uint32_t b = uint32_t(x) << 16; float f; std::memcpy(&f, &b, 4); return f; }
inline void multiply(int c, int a, int b) {
  auto* sum = (float(*)[16])tiles[c];
  auto* left = (uint16_t(*)[32])tiles[a];
  auto* right = (uint16_t(*)[32])tiles[b];
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n++)
        sum[m][n] += wide(left[m][2 * k]) * wide(right[k][2 * n]) + wide(left[m][2 * k + 1]) * wide(right[k][2 * n + 1]);
}
}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadd(t, from, step) emulated::load(t, from, step)
#define _tile_stored(t, to, step) emulated::store(t, to, step)
#define _tile_zero(t) std::memset(emulated::tiles[t], 0, 1024)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _tile_loadconfig emulated::load_config
#define _tile_release() (emulated::ready = false)
#define syscall(...) 0
