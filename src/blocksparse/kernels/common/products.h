// What compiled kernels for CPUs share: vectors of the widest registers, exponentials, products of packed matrices, memory.
//
// The right-hand side of a product is packed: [K, N] fp32, or bf16 in pairs along K, [K / 2, N, 2]. Sums run along K in
// order, whatever the shape, so that a product's bits do not depend on what is multiplied beside it.
#pragma once
#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define MULTIPLIES_BF16 1
#endif
#if defined(MULTIPLIES_BF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// kRows x kVectors sums of kWide numbers stay in registers.
#if defined(__AVX512F__)
constexpr int kWide = 16, kVectors = 4, kRows = 6;
#elif defined(__AVX__)
constexpr int kWide = 8, kVectors = 2, kRows = 6;
#else
constexpr int kWide = 4, kVectors = 4, kRows = 4;
#endif
#if defined(HAS_TILES)
constexpr bool kHasTiles = true;
constexpr int64_t kDepth = 32;  // a matrix unit sums 32 products of bf16
#else
constexpr bool kHasTiles = false;
constexpr int64_t kDepth = 2;
#endif

typedef float vec __attribute__((vector_size(4 * kWide), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * kWide), aligned(4), may_alias));

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

template <typename To, typename From> To as(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }

inline float wide(float x) { return x; }
inline float wide(bf16 x) { return as<float>(uint32_t(x.bits) << 16); }
inline float wide(half x) {
  float magnitude = as<float>(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
  uint32_t bits = as<uint32_t>(magnitude) | (magnitude >= 65536.f ? 0x7f800000u : 0u);
  return as<float>(bits | uint32_t(x.bits & 0x8000) << 16);
}
// 2^x to 2e-7 of it; exactly 0 below -126, NaN for NaN.
inline vec exp2_(vec x) {
#if defined(__AVX512F__)
  vec whole = _mm512_roundscale_ps(x, 8), f = x - whole;
#else
  vec low = x < -126.f ? vec{} - 126.f : x, whole = (low + 12582912.f) - 12582912.f, f = low - whole;
#endif
  vec p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vec{} - 126.f, _CMP_NLT_UQ), p, whole);
#else
  ivec bits = (ivec)p + (__builtin_convertvector(whole, ivec) << 23);
  return x < -126.f ? vec{} : (vec)bits;
#endif
}

// Lanes at distances 1, 2, 4, 8: as `kSwap` has them they change places; of two vectors, `kLow` takes the lanes that the
// first one keeps when squares of that size are transposed, and `kHigh` those of the second one.
struct Lanes { int32_t at[4][kWide]; };
template <typename F> constexpr Lanes lanes(F lane) {
  Lanes x{};
  for (int i = 0; i < 4; i++)
    for (int l = 0; l < kWide; l++) x.at[i][l] = lane(1 << i, l);
  return x;
}
constexpr Lanes kSwap = lanes([](int step, int l) { return l ^ step; });
constexpr Lanes kLow = lanes([](int step, int l) { return l & step ? l - step + kWide : l; });
constexpr Lanes kHigh = lanes([](int step, int l) { return l & step ? l + kWide : l + step; });
inline ivec at(const Lanes& x, int i) { return *(const ivec*)x.at[i]; }

// The greatest lane, and the sum of all lanes.
#if defined(__clang__)
inline float most(vec x) { float m = x[0]; for (int i = 1; i < kWide; i++) m = x[i] > m ? x[i] : m; return m; }
inline float total(vec x) { float m = x[0]; for (int i = 1; i < kWide; i++) m += x[i]; return m; }
#else
inline float most(vec x) {
  for (int i = 0; 1 << i < kWide; i++) { vec y = __builtin_shuffle(x, at(kSwap, i)); x = y > x ? y : x; }
  return x[0];
}
inline float total(vec x) {
  for (int i = 0; 1 << i < kWide; i++) x = x + __builtin_shuffle(x, at(kSwap, i));
  return x[0];
}
#endif

constexpr int64_t kSum = 128;  // products that are added one after another

// C[M, N] (+)= A[M, K] B[K, N] in fp32. Every call sums from 0, so that long sums err less.
template <int R, int V>
inline void panel(int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  vec sum[R][V], b[V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = vec{};
  for (int64_t k = 0; k < K; k++) {
    for (int v = 0; v < V; v++) b[v] = *(const vec*)(B + k * ldb + v * kWide);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sum[r][v] += A[r * lda + k] * b[v];
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      vec* to = (vec*)(C + r * ldc + v * kWide);
      *to = add ? *to + sum[r][v] : sum[r][v];
    }
}

#if defined(MULTIPLIES_BF16)
// The same of bf16, with B in pairs; K and the strides count single numbers.
template <int R, int V>
inline void panel(int64_t K, const bf16* A, int64_t lda, const bf16* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  __m512 sum[R][V];
  __m512bh b[V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2) {
    for (int v = 0; v < V; v++) b[v] = (__m512bh)_mm512_loadu_si512(B + k * ldb + v * 32);
    for (int r = 0; r < R; r++) {
      int32_t two;
      std::memcpy(&two, A + r * lda + k, 4);
      for (int v = 0; v < V; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)_mm512_set1_epi32(two), b[v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      float* to = C + r * ldc + v * 16;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), sum[r][v]) : sum[r][v]);
    }
}
#endif

template <int V, typename X>
void strip(int64_t M, int64_t K, const X* A, int64_t lda, const X* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  int64_t m = 0;
  for (; m + kRows <= M; m += kRows) panel<kRows, V>(K, A + m * lda, lda, B, ldb, C + m * ldc, ldc, add);
  for (; m + 2 <= M; m += 2) panel<2, V>(K, A + m * lda, lda, B, ldb, C + m * ldc, ldc, add);
  if (m < M) panel<1, V>(K, A + m * lda, lda, B, ldb, C + m * ldc, ldc, add);
}

#if defined(HAS_TILES)
// The matrix unit's registers: eight tiles of 16 rows of 64 bytes.
struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// C[M, N] (+)= A[M, K] B[K, N] of bf16; M is a multiple of 16, K and N are multiples of 32.
template <bool Two>
inline void tiles(int64_t K, const bf16* A, int64_t lda, const bf16* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  if (add) {
    _tile_loadd(0, C, ldc * 4);
    _tile_loadd(1, C + 16, ldc * 4);
    if (Two) { _tile_loadd(2, C + 16 * ldc, ldc * 4); _tile_loadd(3, C + 16 * ldc + 16, ldc * 4); }
  } else {
    _tile_zero(0); _tile_zero(1);
    if (Two) { _tile_zero(2); _tile_zero(3); }
  }
  for (int64_t k = 0; k < K; k += 32) {
    _tile_loadd(4, A + k, lda * 2);
    _tile_loadd(6, B + k * ldb, ldb * 4);
    _tile_loadd(7, B + k * ldb + 32, ldb * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (Two) {
      _tile_loadd(5, A + 16 * lda + k, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, C, ldc * 4);
  _tile_stored(1, C + 16, ldc * 4);
  if (Two) { _tile_stored(2, C + 16 * ldc, ldc * 4); _tile_stored(3, C + 16 * ldc + 16, ldc * 4); }
}

bool may_use_tiles() {  // Linux hands out the unit's state on request, once a process
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return granted;
}
#else
bool may_use_tiles() { return false; }
#endif

// A[M, K] has lda = K, B and C have rows of `ld` numbers; N is a multiple of kWide, and of 32 for a matrix unit.
template <typename X>
void product(bool by_tiles, int64_t M, int64_t N, int64_t K, const X* A, const X* B, float* C, bool add, int64_t ld) {
  constexpr int64_t pair = std::is_same_v<X, bf16> ? 2 : 1;
#if defined(HAS_TILES)
  if constexpr (pair == 2) if (by_tiles) {
    for (int64_t n = 0; n < N; n += 32) {
      int64_t m = 0;
      for (; m + 16 < M; m += 32) tiles<true>(K, A + m * K, K, B + n * 2, ld, C + m * ld + n, ld, add);
      if (m < M) tiles<false>(K, A + m * K, K, B + n * 2, ld, C + m * ld + n, ld, add);
    }
    return;
  }
#endif
  (void)by_tiles;
  for (int64_t k = 0; k < K; k += kSum, add = true) {
    const int64_t some = std::min(kSum, K - k);
    const X *a = A + k, *b = B + k * ld;
    int64_t n = 0;
    for (; n + kVectors * kWide <= N; n += kVectors * kWide)
      strip<kVectors>(M, some, a, K, b + n * pair, ld, C + n, ld, add);
    for (; n + 2 * kWide <= N; n += 2 * kWide) strip<2>(M, some, a, K, b + n * pair, ld, C + n, ld, add);
    for (; n < N; n += kWide) strip<1>(M, some, a, K, b + n * pair, ld, C + n, ld, add);
  }
}

template <typename X>
void product(bool by_tiles, int64_t M, int64_t N, int64_t K, const X* A, const X* B, float* C, bool add) {
  product(by_tiles, M, N, K, A, B, C, add, N);
}

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Memory cut into arrays that begin at multiples of 64 bytes; from a null pointer it only counts.
struct Arena {
  char* base;
  int64_t used = 0;
  template <typename T> T* take(int64_t n) {
    T* at = base ? (T*)(base + used) : nullptr;
    used += up(n * int64_t(sizeof(T)), 64);
    return at;
  }
};

char* allocate(int64_t bytes) { return (char*)std::aligned_alloc(64, up(std::max<int64_t>(bytes, 64), 64)); }

}  // namespace
