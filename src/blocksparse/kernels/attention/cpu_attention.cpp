// Block-sparse attention on a CPU; `cpu_attention.py` says what it computes, builds this file and calls it.
//
// It includes no header of PyTorch or Python and links neither, so that one command compiles it in seconds and the
// result outlives updates of both. What it needs of the process comes as pointers to functions: threads of the OpenMP
// that PyTorch has loaded, and Python's lock and pending signals.
//
// Names: a place is where a query stands in a row of blocks, a slot where a key stands in a column of them. A tile is
// up to 128 slots, packed as right-hand sides of both products: keys [D, width] and values [width, E] as fp32, or as
// bf16 in pairs along the axis that is summed, [D / 2, width, 2] and [width / 2, E, 2].
#include <chrono>
#include <system_error>
#include <thread>
#include "../common/products.h"

namespace {

constexpr int64_t kTile = 128, kPlaces = 128;  // slots of a tile, and places that attend at a time, at most
constexpr int64_t kRoom = int64_t(1) << 25;    // bytes of packed tiles at a time, or those of one head if that is more
constexpr int64_t kThreads = 256;
constexpr int32_t kFar = 1 << 30;              // after all positions

// Rounded to nearest, ties to even; NaN stays NaN.
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bf16* to) {
  uint32_t b = as<uint32_t>(x);
  to->bits = uint16_t((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline void narrow(float x, half* to) {
  uint32_t b = as<uint32_t>(x), sign = b >> 16 & 0x8000, size = b & 0x7fffffff;
  if (size > 0x7f800000) size = 0x7e00;
  else if (size >= 0x47800000) size = 0x7c00;
  else if (size < 0x38800000) size = as<uint32_t>(as<float>(size) + 0.5f) - 0x3f000000;  // subnormal
  else size = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  to->bits = uint16_t(sign | size);
}

// tanh(x) to 4e-7 of it. With e = exp(-2 |x|) - 1, which is summed apart so that no digits cancel, it is -e / (e + 2).
inline vec tanh_(vec x) {
  vec y = x < 0.f ? x : -x;
  y = y < -15.f ? vec{} - 15.f : y;  // where tanh is 1
  y = y * 2.885390082f;
  vec whole = (y + 12582912.f) - 12582912.f, f = y - whole;
  vec p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  vec power = (vec)((__builtin_convertvector(whole, ivec) + 127) << 23);
  vec e = power * (p * f) + (power - 1.f);
  e = e / (e + 2.f);
  e = x < 0.f ? e : -e;
  return x == x ? e : x;
}

// `structure` of `compiled.py` reads the fields. Strides count entries; heads of masks and maps divide
// q_heads, or are 1; the last axis of q, k, v, out and of maps is innermost.
struct Call {
  int64_t batch, q_heads, kv_heads, queries, keys, dim, v_dim;
  int64_t q_block, k_block, rows, cols, lead, offset, causal, window;  // no window: 0
  int64_t type, threads;                                               // 0 fp32, 1 bf16, 2 fp16
  int64_t q_step[3], k_step[3], v_step[3], out_step[3];                // of batch, heads, tokens
  int64_t keep_heads, keep_step[4], q_at_heads, q_at_step[2], k_at_heads, k_at_step[3];
  int64_t patience, commit, mean;
  double scale, softcap;  // no softcap: 0
  double skip;            // what a tile's greatest logit may at most lie below the greatest one before; never below it: 0
  const void *q, *k, *v;
  void* out;
  float* lse;                  // [B, Hq, M]
  const uint8_t* keep;         // [B, H, rows, cols]; null: all
  const int32_t *q_at, *k_at;  // [B, H, rows * q_block], [B, H, G, cols * k_block]; null: in order
  const int64_t* map_of_row;   // [rows]; null: map 0
  const float* sinks;          // [Hq]; null: none
  const int32_t *order, *opened, *count;  // [B, Hq, rows, cols], [B, Hq, rows]; null: as `keep` says
  const float* tau;                       // [Hq]
  int32_t* visited;                       // [B, Hq, rows]
  uint8_t* taken;  // [B, Hq, rows, cols], as `keep`; blocks that all queries of a row leave out are cleared; null: not asked
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel; null: none
  void* (*release)();                                            // PyEval_SaveThread
  void (*acquire)(void*);                                        // PyEval_RestoreThread
  int (*signals)();                                              // PyErr_CheckSignals
};

// What lies in a tile: how many slots hold keys, the width in memory, and the first and the last position.
struct Content { int32_t filled, width, first, last; };

// T is the type of the tensors, X that of the factors: bf16 where the CPU multiplies it, else fp32.
template <typename T, typename X>
struct Attention {
  static constexpr bool kNarrow = std::is_same_v<X, bf16>;
  const Call& c;
  const int64_t D, E;          // head dims as packed
  const int64_t places, parts; // places at a time, and how often in a row of blocks
  const int64_t tiles;         // of a block
  const int64_t key_heads;     // heads whose blocks differ in keys or in their order
  const bool by_tiles, shared; // `shared`: blocks are packed once, not anew for every row that keeps them
  const float to_base_2 = 1.4426950408889634f, scale;
  const std::thread::id caller = std::this_thread::get_id();
  void* state = nullptr;       // Python's, while its lock is released
  std::atomic<bool> stopped{false};
  std::chrono::steady_clock::time_point asked = std::chrono::steady_clock::now();

  explicit Attention(const Call& call)
      : c(call), D(kNarrow ? up(c.dim, kDepth) : c.dim), E(up(c.v_dim, kHasTiles && kNarrow ? 32 : kWide)),
        places(c.order ? c.q_block : std::min(c.q_block, kPlaces)), parts((c.q_block + places - 1) / places),
        tiles((c.k_block + kTile - 1) / kTile),
        key_heads(c.k_at && c.k_at_heads > c.kv_heads ? c.k_at_heads : c.kv_heads),
        by_tiles(kHasTiles && kNarrow && may_use_tiles()),
        shared(!c.order && !c.map_of_row && (c.k_block % 32 == 0 || c.cols == 1)),
        scale(float(c.scale) * (c.softcap ? 1.f : to_base_2)) {}

  struct Scratch {  // what one thread holds
    X *q, *w, *kt, *vt;
    float *s, *o, *peak, *sum, *met, *fresh, *o_before, *peak_before, *sum_before;
    int32_t *at, *query, *place, *key;
    void take(Arena& a, const Attention& t) {
      int64_t n = up(t.places, 16), undo = t.c.order && !t.c.commit ? n : 0, own = t.shared ? 0 : kTile;
      q = a.take<X>(n * t.D);
      w = a.take<X>(kNarrow ? n * kTile : 0);
      kt = a.take<X>(own * t.D);
      vt = a.take<X>(own * t.E);
      s = a.take<float>(n * kTile);
      o = a.take<float>(n * t.E);
      peak = a.take<float>(n);
      sum = a.take<float>(n * kWide);
      met = a.take<float>(t.c.skip < 0 ? n : 0);
      fresh = a.take<float>(t.c.order ? n * kWide : 0);
      o_before = a.take<float>(undo * t.E);
      peak_before = a.take<float>(undo);
      sum_before = a.take<float>(undo * kWide);
      at = a.take<int32_t>(n);
      query = a.take<int32_t>(n);
      place = a.take<int32_t>(own);
      key = a.take<int32_t>(own);
    }
  };

  struct Packed {  // tiles of the blocks of some heads that anybody keeps
    X *kt, *vt;
    int32_t* place;
    Content* content;
    uint8_t* used;
    void take(Arena& a, const Attention& t, int64_t units) {
      int64_t n = units * t.c.cols * t.tiles, width = std::min(up(t.c.k_block, 32), kTile);
      kt = a.take<X>(n * t.D * width);
      vt = a.take<X>(n * t.E * width);
      place = a.take<int32_t>(n * width);
      content = a.take<Content>(n);
      used = a.take<uint8_t>(units * t.c.cols);
    }
  };

  // Runs `work` on all threads at once: OpenMP's, or new ones where that cannot be used.
  template <typename F> void together(F work) {
    if (c.threads == 1) return work();
    if (c.parallel) return c.parallel([](void* f) { (*(F*)f)(); }, &work, unsigned(c.threads), 0);
    std::thread others[kThreads];
    int64_t n = 0;
    try {
      for (; n < std::min(c.threads, kThreads) - 1; n++) others[n] = std::thread([&] { work(); });
    } catch (const std::system_error&) {  // so many there cannot be
    }
    work();
    while (n) others[--n].join();
  }

  // Lets Python handle signals, now and then, on the thread that called; true if the call shall end.
  bool interrupted() {
    if (c.signals && std::this_thread::get_id() == caller) {
      auto now = std::chrono::steady_clock::now();
      if (now - asked > std::chrono::milliseconds(50)) {
        asked = now;
        c.acquire(state);
        if (c.signals()) stopped = true;
        state = c.release();
      }
    }
    return stopped.load(std::memory_order_relaxed);
  }

  // Keys and values of `n` tokens, key(0) to key(n - 1), as one tile; columns up to `width` are zeros.
  template <typename At>
  void pack(const T* k, const T* v, int64_t n, int64_t width, At key, X* kt, X* vt) const {
    static const T nothing[256] = {};
    constexpr int64_t unit = kNarrow ? 2 : 1;  // entries that lie together: 32 bits
    const int64_t units = D / unit;
    for (int64_t j0 = 0; j0 < width; j0 += kWide) {
      const T* row[kWide];
      for (int64_t j = 0; j < kWide; j++) row[j] = j0 + j < n ? k + key(j0 + j) * c.k_step[2] : nothing;
      int64_t u = 0;
#if !defined(__clang__)
      for (const int64_t whole = c.dim / unit / kWide * kWide; u < whole; u += kWide) {  // a square of 32-bit entries is transposed by swaps at distances 1, 2, 4, 8
        vec x[kWide];
        for (int i = 0; i < kWide; i++) {
          if constexpr (std::is_same_v<T, X>) std::memcpy(&x[i], row[i] + u * unit, sizeof(vec));
          else for (int l = 0; l < kWide; l++) x[i][l] = wide(row[i][u + l]);
        }
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
          if (1 << n >= kWide) break;
          const ivec low = at(kLow, n), high = at(kHigh, n);
#pragma GCC unroll 16
          for (int i = 0; i < kWide; i++)
            if (!(i & 1 << n)) {
              vec a = x[i], b = x[i + (1 << n)];
              x[i] = __builtin_shuffle(a, b, low);
              x[i + (1 << n)] = __builtin_shuffle(a, b, high);
            }
        }
        for (int i = 0; i < kWide; i++) *(vec*)(kt + ((u + i) * width + j0) * unit) = x[i];
      }
#endif
      for (; u < units; u++)
        for (int64_t j = 0; j < kWide; j++)
          for (int64_t i = 0; i < unit; i++) {
            int64_t d = u * unit + i;
            X* to = kt + (u * width + j0 + j) * unit + i;
            if constexpr (kNarrow) *to = d < c.dim ? row[j][d] : X{};
            else *to = d < c.dim ? wide(row[j][d]) : 0.f;
          }
    }
    for (int64_t j = 0; j < width; j += unit) {
      const T* a = j < n ? v + key(j) * c.v_step[2] : nothing;
      X* to = vt + j * E;
      if constexpr (kNarrow) {
        const T* b = j + 1 < n ? v + key(j + 1) * c.v_step[2] : nothing;
        for (int64_t d = 0; d < c.v_dim; d++) {
          uint32_t two = a[d].bits | uint32_t(b[d].bits) << 16;
          std::memcpy(to + 2 * d, &two, 4);
        }
      } else {
        for (int64_t d = 0; d < c.v_dim; d++) to[d] = wide(a[d]);
      }
      for (int64_t d = c.v_dim * unit; d < E * unit; d++) to[d] = X{};
    }
  }

  // Logits `s` [n, width] to weights, in place or in `w`, relative to the greatest logit of each query so far; sums and
  // outputs so far are made relative to it, too. With `fresh` the sum of these weights is kept apart. With `may_skip` queries
  // leave the tile out whose logits are far below those of tiles before; true if all do.
  // A row's peak is kept before it is scaled, and subtracted before: a product rounded apart would move large logits.
  float per_peak() const { return c.softcap ? 1.f : scale; }

  template <bool Masked>
  bool weigh(const Scratch& r, int64_t n, int64_t width, const int32_t* place, float* fresh, bool may_skip) const {
    const float never = -INFINITY, cap = float(c.softcap), into = cap ? scale / cap : 0.f, out_of = cap * to_base_2;
    const float factor = per_peak(), far = float(c.skip) * to_base_2;
    bool none = true;
    for (int64_t m = 0; m < n; m++) {
      float* x = r.s + m * width;
      vec top = vec{} + never;
      const int32_t last = r.at[m], before = c.window ? last - int32_t(c.window) : INT_MIN;
      for (int64_t j = 0; j < width; j += kWide) {
        vec y = *(vec*)(x + j);
        if (cap) y = tanh_(y * into) * out_of;
        if (Masked) {
          ivec p = *(const ivec*)(place + j);
          y = ((p <= last) & (p > before)) ? y : vec{} + never;
        }
        if (Masked || cap) *(vec*)(x + j) = y;
        top = y > top ? y : top;
      }
      const float peak = r.peak[m], highest = most(top), now = highest > peak ? highest : peak;
      if (may_skip) {
        if ((highest - r.met[m]) * factor < far) {
          if constexpr (kNarrow) std::memset((void*)(r.w + m * width), 0, width * sizeof(X));
          else std::fill_n(x, width, 0.f);
          continue;
        }
        r.met[m] = std::max(r.met[m], highest);
      }
      none = false;
      const vec base = vec{} + (now == never ? 0.f : now);
      vec sum{};
      if constexpr (kNarrow) {
#if defined(MULTIPLIES_BF16)
        bf16* w = r.w + m * width;
        for (int64_t j = 0; j < width; j += 2 * kWide) {
          vec a = exp2_((*(vec*)(x + j) - base) * factor), b = exp2_((*(vec*)(x + j + kWide) - base) * factor);
          sum += a + b;
          _mm512_storeu_si512(w + j, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
#endif
      } else {
        for (int64_t j = 0; j < width; j += kWide) {
          vec a = exp2_((*(vec*)(x + j) - base) * factor);
          *(vec*)(x + j) = a;
          sum += a;
        }
      }
      vec *so_far = (vec*)(r.sum + m * kWide), *apart = fresh ? (vec*)(fresh + m * kWide) : so_far;
      if (now != peak) {
        vec shrink = exp2_((vec{} + peak - base) * factor);
        *so_far *= shrink;
        if (fresh) *apart *= shrink;
        for (int64_t d = 0; d < E; d += kWide) *(vec*)(r.o + m * E + d) *= shrink;
        r.peak[m] = now;
      }
      *apart += sum;
    }
    return none;
  }

  // Attention of `n` queries to one tile; whether any of them takes it.
  bool visit(const Scratch& r, int64_t n, int64_t width, const X* kt, const X* vt, const int32_t* place, bool masked,
             float* fresh = nullptr, bool may_skip = false) const {
    product<X>(by_tiles, n, width, D, r.q, kt, r.s, false);
    const bool none = masked ? weigh<true>(r, n, width, place, fresh, false) : weigh<false>(r, n, width, place, fresh, may_skip);
    if (none) return false;
    const X* weights;
    if constexpr (kNarrow) weights = r.w; else weights = r.s;
    product<X>(by_tiles, n, E, width, weights, vt, r.o, true);
    return true;
  }

  struct Row {  // the queries of one part of a row of blocks
    int64_t b, h, row, n;
    int32_t first, last;  // of their positions
  };

  Row load(Scratch& r, int64_t b, int64_t h, int64_t row, int64_t part) const {
    Row x{b, h, row, 0, kFar, -1};
    const T* q = (const T*)c.q + b * c.q_step[0] + h * c.q_step[1];
    const int32_t* at = c.q_at ? c.q_at + b * c.q_at_step[0] + h * c.q_at_heads / c.q_heads * c.q_at_step[1] : nullptr;
    int64_t begin = row * c.q_block + part * places, end = std::min(begin + places, (row + 1) * c.q_block);
    for (int64_t place = begin; place < end; place++) {
      int64_t query = at ? at[place] - c.offset : place - c.lead;
      if (at ? at[place] < 0 : query < 0 || query >= c.queries) continue;
      int32_t position = c.causal ? int32_t(query + c.offset) : kFar;
      x.first = std::min(x.first, position);
      x.last = std::max(x.last, position);
      r.query[x.n] = int32_t(query);
      r.at[x.n] = position;
      const T* from = q + query * c.q_step[2];
      X* to = r.q + x.n * D;
      if constexpr (std::is_same_v<T, X>) std::memcpy(to, from, c.dim * sizeof(T));
      else for (int64_t d = 0; d < c.dim; d++) to[d] = wide(from[d]);
      x.n++;
    }
    std::fill_n(r.peak, x.n, -INFINITY);
    if (c.skip < 0) std::fill_n(r.met, x.n, -INFINITY);
    std::fill_n(r.sum, x.n * kWide, 0.f);
    std::fill_n(r.o, x.n * E, 0.f);
    return x;
  }

  bool sees(const Row& x, int32_t first, int32_t last) const {
    return first <= x.last && (!c.window || last > x.first - c.window);
  }
  bool sees_whole(const Row& x, int32_t first, int32_t last) const {
    return last <= x.first && (!c.window || first > x.last - c.window);
  }

  void store(const Scratch& r, const Row& x) const {
    T* out = (T*)c.out + x.b * c.out_step[0] + x.h * c.out_step[1];
    float* lse = c.lse + (x.b * c.q_heads + x.h) * c.queries;
    for (int64_t m = 0; m < x.n; m++) {
      float peak = r.peak[m] * per_peak(), sum = total(*(const vec*)(r.sum + m * kWide)), share = 1.f;
      const bool nothing = sum == 0.f;
      if (c.sinks && c.sinks[x.h] > -INFINITY) {  // -inf is no sink
        float sink = c.sinks[x.h] * to_base_2, now = std::max(peak, sink);
        share = std::exp2(peak - now);
        sum = sum * share + std::exp2(sink - now);
        peak = now;
      }
      T* to = out + r.query[m] * c.out_step[2];
      const float factor = nothing ? 0.f : share / sum;
      const float* o = r.o + m * E;
      if (nothing) std::memset((void*)to, 0, c.v_dim * sizeof(T));
      else for (int64_t d = 0; d < c.v_dim; d++) narrow(o[d] * factor, to + d);
      lse[r.query[m]] = sum == 0.f ? -INFINITY : peak / to_base_2 + std::log(sum);
    }
  }

  const uint8_t* kept(int64_t b, int64_t h, int64_t row) const {
    return c.keep ? c.keep + b * c.keep_step[0] + h * c.keep_heads / c.q_heads * c.keep_step[1] + row * c.keep_step[2] : nullptr;
  }
  const int32_t* slots(int64_t b, int64_t h, int64_t row) const {
    if (!c.k_at) return nullptr;
    int64_t map = c.map_of_row ? c.map_of_row[row] : 0;
    return c.k_at + b * c.k_at_step[0] + h * c.k_at_heads / c.q_heads * c.k_at_step[1] + map * c.k_at_step[2];
  }
  const T* of_head(const void* x, const int64_t* step, int64_t b, int64_t h) const {
    return (const T*)x + b * step[0] + h * c.kv_heads / c.q_heads * step[1];
  }
  // The key in a slot, -1 where it is empty.
  int32_t key_in(const int32_t* at, int64_t slot) const { return at ? at[slot] : slot < c.keys ? int32_t(slot) : -1; }

  // Attention of a part of a row to the blocks it keeps, packed before.
  void attend_shared(Scratch& r, const Packed& p, int64_t unit, int64_t b, int64_t h, int64_t row, int64_t part) const {
    Row x = load(r, b, h, row, part);
    const uint8_t* keep = kept(b, h, row);
    uint8_t* taken = c.taken ? c.taken + ((b * c.q_heads + h) * c.rows + row) * c.cols : nullptr;
    const int64_t width = std::min(up(c.k_block, 32), kTile);
    for (int64_t col = 0; x.n && col < c.cols; col++) {
      if (keep && !keep[col * c.keep_step[3]]) continue;
      for (int64_t i = (unit * c.cols + col) * tiles, end = i + tiles; i < end; i++) {
        const Content& t = p.content[i];
        if (!t.filled || !sees(x, t.first, t.last)) continue;
        bool whole = t.filled == t.width && sees_whole(x, t.first, t.last);
        bool any = visit(r, x.n, t.width, p.kt + i * D * width, p.vt + i * E * width, p.place + i * width, !whole, nullptr,
                         c.skip < 0 && t.filled == c.k_block);
        if (taken && !any) taken[col] = 0;
      }
    }
    store(r, x);
  }

  // Packs what lies in the first `n` entries of `r.key`, and attends to it.
  void visit_keys(Scratch& r, const Row& x, int64_t n, float* fresh = nullptr) const {
    int64_t width = up(n, 32);
    int32_t first = kFar, last = -1;
    for (int64_t j = 0; j < width; j++) r.place[j] = j < n ? r.key[j] : INT_MAX;
    for (int64_t j = 0; j < n; j++) { first = std::min(first, r.key[j]); last = std::max(last, r.key[j]); }
    pack(of_head(c.k, c.k_step, x.b, x.h), of_head(c.v, c.v_step, x.b, x.h), n, width,
         [&](int64_t j) { return int64_t(r.key[j]); }, r.kt, r.vt);
    visit(r, x.n, width, r.kt, r.vt, r.place, n != width || !sees_whole(x, first, last), fresh);
  }

  // The same without blocks: keys that somebody of the part may see are gathered into tiles.
  void attend_gathered(Scratch& r, int64_t b, int64_t h, int64_t row, int64_t part) const {
    Row x = load(r, b, h, row, part);
    const uint8_t* keep = kept(b, h, row);
    const int32_t* at = slots(b, h, row);
    int64_t n = 0;
    for (int64_t col = 0; x.n && col < c.cols; col++) {
      if (keep && !keep[col * c.keep_step[3]]) continue;
      for (int64_t slot = col * c.k_block, end = slot + c.k_block; slot < end; slot++) {
        int32_t key = key_in(at, slot);
        if (key < 0 || !sees(x, key, key)) continue;
        r.key[n++] = key;
        if (n == kTile) { visit_keys(r, x, n); n = 0; }
      }
    }
    if (n) visit_keys(r, x, n);
    store(r, x);
  }

  // Attention of a row to its blocks in the order given, until they add little.
  void attend_until(Scratch& r, int64_t b, int64_t h, int64_t row) const {
    Row x = load(r, b, h, row, 0);
    const int32_t* at = slots(b, h, row);
    const int64_t t = (b * c.q_heads + h) * c.rows + row;
    const float tau = c.tau[h];
    int64_t done = 0, low = 0;
    std::fill_n(r.fresh, x.n * kWide, 0.f);
    for (int64_t i = 0; i < c.count[t]; i++) {
      const bool may_stop = i >= c.opened[t];
      if (may_stop && !c.commit) {
        std::copy_n(r.o, x.n * E, r.o_before);
        std::copy_n(r.peak, x.n, r.peak_before);
        std::copy_n(r.sum, x.n * kWide, r.sum_before);
      }
      int64_t slot = c.order[t * c.cols + i] * c.k_block, end = slot + c.k_block, n = 0;
      for (; slot < end; slot++) {
        int32_t key = key_in(at, slot);
        if (key >= 0 && sees(x, key, key)) r.key[n++] = key;
        if (n == kTile) { visit_keys(r, x, n, r.fresh); n = 0; }
      }
      if (n) visit_keys(r, x, n, r.fresh);
      bool all = true;
      double gains = 0;
      for (int64_t m = 0; m < x.n; m++) {
        vec *sum = (vec*)(r.sum + m * kWide), *fresh = (vec*)(r.fresh + m * kWide);
        if (may_stop) {
          float before = total(*sum), gain = before == 0.f ? INFINITY : total(*fresh) / before;
          all = all && gain < tau;
          gains += gain;
        }
        *sum += *fresh;
        *fresh = vec{};
      }
      const bool satisfied = may_stop && (c.mean ? float(gains) < tau * float(x.n) : all);
      low = satisfied ? low + 1 : 0;
      done = i + 1;
      if (low < c.patience) continue;
      if (!c.commit) {
        std::copy_n(r.o_before, x.n * E, r.o);
        std::copy_n(r.peak_before, x.n, r.peak);
        std::copy_n(r.sum_before, x.n * kWide, r.sum);
        done = i;
      }
      break;
    }
    c.visited[t] = int32_t(done);
    store(r, x);
  }

  // Which blocks anybody keeps.
  void mark(const Packed& p, int64_t first, int64_t units) const {
    if (!c.keep) { std::memset(p.used, 1, units * c.cols); return; }
    std::memset(p.used, 0, units * c.cols);
    const int64_t per = c.q_heads / key_heads, step = c.keep_step[3];
    for (int64_t u = 0; u < units; u++) {
      const int64_t b = (first + u) / key_heads, kh = (first + u) % key_heads;
      uint8_t* used = p.used + u * c.cols;
      for (int64_t h = kh * per; h < (kh + 1) * per; h++)
        for (int64_t row = 0; row < c.rows; row++) {
          const uint8_t* keep = kept(b, h, row);
          for (int64_t col = 0; col < c.cols; col++) used[col] |= keep[col * step];
        }
    }
  }

  void pack_block(const Packed& p, int64_t first, int64_t unit, int64_t col) const {
    const int64_t b = (first + unit) / key_heads, h = (first + unit) % key_heads * (c.q_heads / key_heads);
    const int64_t step = std::min(up(c.k_block, 32), kTile), end = (col + 1) * c.k_block;
    const int32_t* at = slots(b, h, 0);
    int64_t i = (unit * c.cols + col) * tiles;
    for (int64_t slot = col * c.k_block; slot < end; slot += kTile, i++) {
      int32_t* place = p.place + i * step;
      int32_t key[kTile];
      Content t{0, 0, kFar, -1};
      for (int64_t j = slot; j < std::min(slot + kTile, end); j++)
        if (int32_t x = key_in(at, j); x >= 0) {
          key[t.filled++] = x;
          t.first = std::min(t.first, x);
          t.last = std::max(t.last, x);
        }
      t.width = int32_t(up(t.filled, 32));
      for (int64_t j = 0; j < t.width; j++) place[j] = j < t.filled ? key[j] : INT_MAX;
      p.content[i] = t;
      if (t.filled)
        pack(of_head(c.k, c.k_step, b, h), of_head(c.v, c.v_step, b, h), t.filled, t.width,
             [&](int64_t j) { return int64_t(key[j]); }, p.kt + i * D * step, p.vt + i * E * step);
    }
  }

  // 0, or 1 if there is no memory, or 2 if a signal's handler raised.
  int run() {
    Arena count{nullptr}, packs{nullptr};
    Scratch scratch;
    scratch.take(count, *this);
    const int64_t units = c.batch * key_heads, each = count.used;
    int64_t at_once = units;
    if (shared) {
      Packed one;
      one.take(packs, *this, 1);
      at_once = std::min(units, std::max<int64_t>(1, kRoom / std::max<int64_t>(1, packs.used)));
    }
    char* desks = allocate(each * c.threads);
    char* tiles_of = shared ? allocate((packs.used + 320) * at_once) : nullptr;
    if (!desks || (shared && !tiles_of)) { std::free(desks); std::free(tiles_of); return 1; }
    std::memset(desks, 0, each * c.threads);  // the columns and rows that fill up tiles
    if (c.release) state = c.release();
    for (int64_t first = 0; first < units && !stopped; first += at_once) {
      const int64_t some = std::min(at_once, units - first);
      Packed p{};
      std::atomic<int64_t> next{0};
      if (shared) {
        Arena arena{tiles_of};
        p.take(arena, *this, some);
        mark(p, first, some);
        together([&] {
          for (int64_t i; (i = next.fetch_add(1)) < some * c.cols;)
            if (p.used[i]) pack_block(p, first, i / c.cols, i % c.cols);
        });
        next = 0;
      }
      std::atomic<int64_t> desk{0};
      const int64_t per = c.q_heads / key_heads, heads = some * per, steps = c.order ? c.rows : c.rows * parts;
      together([&] {  // the last rows first: when causal they are the longest
        Arena arena{desks + desk.fetch_add(1) * each};
        Scratch r;
        r.take(arena, *this);
#if defined(HAS_TILES)
        if (by_tiles) { const TileConfig config; _tile_loadconfig(&config); }
#endif
        for (int64_t i; !interrupted() && (i = next.fetch_add(1)) < heads * steps;) {
          const int64_t unit = i % heads / per, b = (first + unit) / key_heads;
          const int64_t h = (first + unit) % key_heads * per + i % per, step = steps - 1 - i / heads;
          if (c.order) attend_until(r, b, h, step);
          else if (shared) attend_shared(r, p, unit, b, h, step / parts, step % parts);
          else attend_gathered(r, b, h, step / parts, step % parts);
        }
#if defined(HAS_TILES)
        if (by_tiles) _tile_release();
#endif
      });
    }
    if (c.acquire) c.acquire(state);
    std::free(desks);
    std::free(tiles_of);
    return stopped ? 2 : 0;
  }
};

}  // namespace

extern "C" {

int blocksparse_attend(const Call* c) {
  switch (c->type) {
    case 0: return Attention<float, float>(*c).run();
    case 2: return Attention<half, float>(*c).run();
  }
#if defined(MULTIPLIES_BF16)
  return Attention<bf16, bf16>(*c).run();
#else
  return Attention<bf16, float>(*c).run();
#endif
}

// What the file was compiled for: numbers in a vector, whether bf16 is multiplied as it is, and
// whether by a matrix unit.
int blocksparse_vector() { return kWide; }
int blocksparse_bf16() {
#if defined(MULTIPLIES_BF16)
  return may_use_tiles() ? 2 : 1;
#else
  return 0;
#endif
}

}  // extern "C"
