// What chooses blocks on a CPU: scores of blocks, columns and diagonals, products, means, orders and shares. `cpu_scores.py`
// builds this file and calls it.
//
// Scores and products multiply rows of queries with all keys. Keys are packed once, as panels of kPanel columns: [K, kPanel]
// fp32, or bf16 in pairs along K, [K / 2, kPanel, 2]. Every sum is taken in an order that depends on sizes alone, so that
// the number of threads changes no bit.
#include <cfloat>
#include <numeric>
#include "../common/products.h"

namespace {

constexpr int64_t kPanel = 64, kAtOnce = 48;  // columns of a panel, and rows that are multiplied at a time, at most
constexpr int64_t kLogits = 160 << 10;              // of the rows of last queries that are taken at a time, or those of 16
constexpr float kToBase2 = 1.4426950408889634f;

// Who works. `structure` of `compiled.py` reads the fields of this and of all other structs.
struct Team {
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel; null in a process that has forked
  void* (*release)();                                            // PyEval_SaveThread
  void (*acquire)(void*);                                        // PyEval_RestoreThread
};

// What is multiplied. Strides count entries, here and elsewhere.
struct Tokens {
  Team team;
  int64_t batch, q_heads, kv_heads, queries, keys, slots, dim, type;  // 0 fp32, 1 bf16, 2 fp16
  int64_t q_step[4], k_step[4];                                       // of batch, heads, vectors, slots of a vector
  const void *q, *k;
};

template <typename Work> void together(const Team& team, Work work) {
  if (team.threads == 1 || !team.parallel) return work();
  team.parallel([](void* w) { (*(Work*)w)(); }, &work, unsigned(team.threads), 0);
}

// Lets all threads call `work(i)` for i < tasks, some at a time.
template <typename Work> void share_out(const Team& team, int64_t tasks, int64_t some, Work work) {
  void* state = team.release ? team.release() : nullptr;
  std::atomic<int64_t> next{0};
  together(team, [&] {
    for (int64_t first; (first = next.fetch_add(some)) < tasks;)
      for (int64_t i = first; i < std::min(first + some, tasks); i++) work(i);
  });
  if (team.acquire) team.acquire(state);
}

// X is the type of the factors: bf16 where the CPU multiplies it, else fp32. T, below, is that of the tensors.
template <typename X>
struct Products {
  static constexpr bool kNarrow = std::is_same_v<X, bf16>;
  static constexpr int64_t kPair = kNarrow ? 2 : 1;
  const Tokens& c;
  const bool flipped;
  const int64_t E, K, panels;  // numbers of a vector, and as packed
  const bool by_tiles;
  X* packed = nullptr;

  Products(const Tokens& call, bool flip)
      : c(call), flipped(flip), E(c.slots * c.dim), K(kNarrow ? up(E, kDepth) : E), panels((c.keys + kPanel - 1) / kPanel),
        by_tiles(kHasTiles && kNarrow && may_use_tiles()) {}

  template <typename T> static X factor(T x) { if constexpr (kNarrow) return x; else return wide(x); }

  // Calls `work` with a null pointer to the type of the tensors.
  template <typename Work> void typed(Work work) const {
    if constexpr (kNarrow) work((bf16*)nullptr);
    else if (c.type == 0) work((float*)nullptr);
    else if (c.type == 1) work((bf16*)nullptr);
    else work((half*)nullptr);
  }
  void pack_panel(int64_t unit, int64_t p) const {
    typed([&](auto* t) { pack_panel_of<std::remove_pointer_t<decltype(t)>>(unit, p); });
  }
  void take_row(int64_t b, int64_t h, int64_t row, X* to) const {
    typed([&](auto* t) { take_row_of<std::remove_pointer_t<decltype(t)>>(b, h, row, to); });
  }

  template <typename T> void pack_panel_of(int64_t unit, int64_t p) const {
    const T* k = (const T*)c.k + unit / c.kv_heads * c.k_step[0] + unit % c.kv_heads * c.k_step[1];
    X* to = packed + (unit * panels + p) * K * kPanel;
    const int64_t first = p * kPanel, n = std::min(kPanel, c.keys - first);
    if (n < kPanel || K != E) std::memset((void*)to, 0, K * kPanel * sizeof(X));
    for (int64_t s = 0; s < c.slots; s++) {
      const T* from = k + first * c.k_step[2] + s * c.k_step[3];
      const int64_t e = s * c.dim;
      if (kNarrow && c.dim % 2 == 0) {
        for (int64_t d = 0; d < c.dim; d += 2)
          for (int64_t j = 0; j < n; j++) std::memcpy((void*)(to + (e + d) * kPanel + 2 * j), from + j * c.k_step[2] + d, 2 * sizeof(T));
      } else {
        for (int64_t d = 0; d < c.dim; d++)
          for (int64_t j = 0; j < n; j++) to[(e + d) / kPair * kPair * kPanel + j * kPair + (e + d) % kPair] = factor(from[j * c.k_step[2] + d]);
      }
    }
  }

  // One vector of queries as a row of the left-hand side.
  template <typename T> void take_row_of(int64_t b, int64_t h, int64_t row, X* to) const {
    const T* q = (const T*)c.q + b * c.q_step[0] + h * c.q_step[1] + row * c.q_step[2];
    for (int64_t s = 0; s < c.slots; s++) {
      const T* from = q + (flipped ? c.slots - 1 - s : s) * c.q_step[3];
      if constexpr (std::is_same_v<T, X>) std::memcpy((void*)(to + s * c.dim), from, c.dim * sizeof(X));
      else for (int64_t d = 0; d < c.dim; d++) to[s * c.dim + d] = factor(from[d]);
    }
  }

  // logits[M, kPanel] of the rows `A` [M, K] with the first columns of one panel.
  void multiply(int64_t M, const X* A, int64_t unit, int64_t p, float* logits, int64_t columns = kPanel) const {
    product(by_tiles, by_tiles ? up(M, 16) : M, columns, K, A, packed + (unit * panels + p) * K * kPanel, logits, false, kPanel);
  }

  // Packs all keys, then lets all threads call `work(i, memory)` for i < tasks, each with memory of its own.
  template <typename Work> int run(int64_t tasks, int64_t bytes, Work work) {
    const int64_t units = c.batch * c.kv_heads;
    packed = (X*)allocate(units * panels * K * kPanel * sizeof(X));
    char* desks = allocate(bytes * c.team.threads);
    if (!packed || !desks) { std::free(packed); std::free(desks); return 1; }
    void* state = c.team.release ? c.team.release() : nullptr;
    std::atomic<int64_t> next{0}, then{0}, desk{0};
    together(c.team, [&] { for (int64_t i; (i = next.fetch_add(1)) < units * panels;) pack_panel(i / panels, i % panels); });
    together(c.team, [&] {
#if defined(HAS_TILES)
      if (by_tiles) { const TileConfig config; _tile_loadconfig(&config); }
#endif
      char* mine = desks + desk.fetch_add(1) * bytes;
      std::memset(mine, 0, bytes);  // rows that fill up tiles
      for (int64_t i; (i = then.fetch_add(1)) < tasks;) work(tasks - 1 - i, mine);  // when causal the last are the longest
#if defined(HAS_TILES)
      if (by_tiles) _tile_release();
#endif
    });
    if (c.team.acquire) c.team.acquire(state);
    std::free(packed);
    std::free(desks);
    return 0;
  }
};

// The logits of a row lie in pieces, one in each of `n` panels `step` apart. They become exp(scale * (logit - greatest)), or
// 0 where they are -inf; the result is 1 / their sum, 0 if all are -inf, and NaN if one is NaN, which is no greatest one.
inline float softmax(float* logits, int64_t n, int64_t step, vec greatest, float scale = 1.f) {
  const float top = most(greatest), factor = scale * kToBase2;
  if (top == -INFINITY) {
    for (int64_t i = 0; i < n; i++)
      if (std::any_of(logits + i * step, logits + i * step + kPanel, [](float x) { return x != x; })) return NAN;
    return 0.f;
  }
  vec sum{};
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < kPanel; j += kWide) {
      vec& x = *(vec*)(logits + i * step + j);
      x = exp2_((x - top) * factor);
      sum += x;
    }
  return 1.f / total(sum);
}

}  // namespace

extern "C" {

// Which cells a query cell reaches: keys with k_first <= q_last, k_last > q_floor and an index below limit.
struct StridedMassCall {
  Tokens tokens;
  int64_t high, wide, empty, rows, cols, flipped;
  int64_t q_at_heads, q_at_batch, k_at_heads, k_at_batch;  // strides of batch entries; heads divide those of q and of k
  double weight;
  const int32_t *q_last, *q_floor, *limit, *k_first, *k_last;  // [B, H, cells] and limit [cells]; null: all
  float* mass;                                                   // [B, Hq, rows, cols]
};

}

namespace {

template <typename X>
int strided_mass(const StridedMassCall& call) {
  const Tokens& c = call.tokens;
  Products<X> products(c, call.flipped);
  const int64_t panels = products.panels, K = products.K, width = panels * kPanel, group = c.q_heads / c.kv_heads;
  const int64_t rows = std::max<int64_t>(1, kAtOnce / (call.high * group));  // rows of blocks of a task
  const int64_t parts = (call.rows + rows - 1) / rows;
  const int64_t at_heads = call.k_at_heads, ats = (call.k_at_batch ? c.batch : 1) * at_heads;
  // The positions of keys as panels have them, and their bounds in every panel.
  Arena count{nullptr};
  struct At { int32_t *first, *last, *least_first, *most_first, *least_last, *most_last; } at;
  auto take = [&](Arena& a) {
    at.first = a.take<int32_t>(ats * width); at.last = a.take<int32_t>(ats * width);
    for (int32_t** x : {&at.least_first, &at.most_first, &at.least_last, &at.most_last}) *x = a.take<int32_t>(ats * panels);
  };
  take(count);
  char* memory = allocate(count.used);
  if (!memory) return 1;
  Arena arena{memory};
  take(arena);
  for (int64_t u = 0; u < ats; u++) {
    const int64_t from = u / at_heads * call.k_at_batch + u % at_heads * c.keys;
    for (int64_t j = 0; j < width; j++) {
      const bool there = j < c.keys;
      at.first[u * width + j] = !there ? INT_MAX : call.k_first ? call.k_first[from + j] : 0;
      at.last[u * width + j] = !there ? -1 : call.k_last ? call.k_last[from + j] : INT_MAX;
    }
    for (int64_t p = 0; p < panels; p++) {
      const int32_t *first = at.first + u * width + p * kPanel, *last = at.last + u * width + p * kPanel;
      at.least_first[u * panels + p] = *std::min_element(first, first + kPanel);
      at.most_first[u * panels + p] = *std::max_element(first, first + kPanel);
      at.least_last[u * panels + p] = *std::min_element(last, last + kPanel);
      at.most_last[u * panels + p] = *std::max_element(last, last + kPanel);
    }
  }

  struct Desk { X* a; float *logits, *mass; int64_t *active, *cell; };
  auto desk = [&](Arena& a) {
    return Desk{a.take<X>(kAtOnce * K), a.take<float>(kAtOnce * width), a.take<float>(group * rows * width), a.take<int64_t>(panels), a.take<int64_t>(kAtOnce)};
  };
  Arena each{nullptr};
  desk(each);
  const int failed = products.run(c.batch * c.kv_heads * parts, each.used, [&](int64_t task, char* mine) {
    Arena a{mine};
    Desk d = desk(a);
    const int64_t units = c.batch * c.kv_heads, unit = task % units, part = task / units, b = unit / c.kv_heads, kh = unit % c.kv_heads;
    const int64_t top = part * rows, bottom = std::min(top + rows, call.rows);
    const int64_t first = std::max<int64_t>(top * call.high - call.empty, 0), end = std::min(bottom * call.high - call.empty, c.queries), n = end - first;
    const int64_t u = (call.k_at_batch ? b * at_heads : 0) + kh * at_heads / c.kv_heads;
    std::memset(d.mass, 0, group * rows * width * sizeof(float));
    for (int64_t done = 0; done < group * n; done += kAtOnce) {
      const int64_t M = std::min(kAtOnce, group * n - done);
      int32_t last = -1, floor = INT_MAX, limit = 0;
      int32_t lasts[kAtOnce], floors[kAtOnce], limits[kAtOnce];
      for (int64_t m = 0; m < M; m++) {
        const int64_t h = kh * group + (done + m) / n, cell = first + (done + m) % n;
        products.take_row(b, h, cell, d.a + m * K);
        const int64_t q_at = b * call.q_at_batch + h * call.q_at_heads / c.q_heads * c.queries + cell;
        lasts[m] = call.q_last ? call.q_last[q_at] : INT_MAX - 1;
        floors[m] = call.q_floor ? call.q_floor[q_at] : INT_MIN;
        limits[m] = call.limit ? call.limit[cell] : int32_t(width);
        last = std::max(last, lasts[m]); floor = std::min(floor, floors[m]); limit = std::max(limit, limits[m]);
      }
      const int64_t step = up(M, 16) * kPanel;
      int64_t active = 0;
      for (int64_t p = 0; p < panels; p++) {
        const int64_t i = u * panels + p;
        if (at.least_first[i] > last || at.most_last[i] <= floor || p * kPanel >= limit) continue;
        int64_t columns = kPanel;  // those behind are in nobody's reach
        const int32_t* first_at = at.first + u * width + p * kPanel;
        if (at.most_first[i] > last)
          while (columns > 32 && *std::min_element(first_at + columns - 32, first_at + columns) > last) columns -= 32;
        products.multiply(M, d.a, unit, p, d.logits + active * step, columns);
        d.active[active++] = p;
      }
      const float weight = float(call.weight);
      for (int64_t m = 0; m < M; m++) {
        float* row = d.logits + m * kPanel;
        vec greatest = vec{} - INFINITY;
        for (int64_t i = 0; i < active; i++) {
          const int64_t p = d.active[i], k = u * panels + p;
          const bool all = at.most_first[k] <= lasts[m] && at.least_last[k] > floors[m] && (p + 1) * kPanel <= limits[m];
          for (int64_t j = 0; j < kPanel; j += kWide) {
            vec& x = *(vec*)(row + i * step + j);
            vec y = x * weight;
            if (!all) {
              const ivec lo = *(const ivec*)(at.first + u * width + p * kPanel + j), hi = *(const ivec*)(at.last + u * width + p * kPanel + j);
              const float none = -INFINITY;
              y = ((lo <= lasts[m]) & (hi > floors[m])) ? y : vec{} + none;
              for (int64_t l = std::max<int64_t>(0, limits[m] - p * kPanel - j); l < kWide; l++) y[l] = none;
            }
            greatest = y > greatest ? y : greatest;
            x = y;
          }
        }
        const float share = softmax(row, active, step, greatest);
        if (share == 0.f) continue;
        const int64_t g = (done + m) / n, cell = first + (done + m) % n;
        float* mass = d.mass + (g * rows + (cell + call.empty) / call.high - top) * width;
        for (int64_t i = 0; i < active; i++)
          for (int64_t j = 0; j < kPanel; j += kWide) *(vec*)(mass + d.active[i] * kPanel + j) += *(vec*)(row + i * step + j) * share;
      }
    }
    for (int64_t g = 0; g < group; g++)
      for (int64_t r = top; r < bottom; r++) {
        const float* mass = d.mass + (g * rows + r - top) * width;
        float* to = call.mass + ((b * c.q_heads + kh * group + g) * call.rows + r) * call.cols;
        for (int64_t col = 0; col < call.cols; col++) {
          float sum = 0.f;
          for (int64_t j = col * call.wide; j < std::min((col + 1) * call.wide, c.keys); j++) sum += mass[j];
          to[col] = sum;
        }
      }
  });
  std::free(memory);
  return failed;
}

}  // namespace

extern "C" {

// The last queries and all keys. A query at position p = first + row sees keys before `seen`; when causal those up to p;
// in a window (0: none) those after p - window.
struct LastQueriesCall {
  Tokens tokens;
  int64_t first, causal, window, seen, parts, distances;  // 0 distances: none are asked for
  double scale, share;                                // what a weight counts in the sums
  float *vertical, *slash;                            // [B, Hq, parts, keys], [B, Hq, parts, distances]
};

}

namespace {

template <typename X>
int last_query_weights(const LastQueriesCall& call) {
  const Tokens& c = call.tokens;
  Products<X> products(c, false);
  const int64_t panels = products.panels, K = products.K, width = panels * kPanel;
  const int64_t each_part = up((c.queries + call.parts - 1) / call.parts, kRows);
  const int64_t at_once = std::min(kAtOnce, std::max<int64_t>(16, kLogits / width / kRows * kRows));
  struct Desk { X* a; float *logits, *vertical, *diagonal; };
  auto desk = [&](Arena& a) {
    return Desk{a.take<X>(up(at_once, 16) * K), a.take<float>(up(at_once, 16) * width), a.take<float>(width), a.take<float>(call.distances ? width + each_part : 0)};
  };
  Arena each{nullptr};
  desk(each);
  return products.run(c.batch * c.q_heads * call.parts, each.used, [&](int64_t task, char* mine) {
    Arena a{mine};
    Desk d = desk(a);
    const int64_t part = task % call.parts, b = task / call.parts / c.q_heads, h = task / call.parts % c.q_heads;
    const int64_t unit = b * c.kv_heads + h * c.kv_heads / c.q_heads;
    const int64_t top = std::min(part * each_part, c.queries), bottom = std::min(top + each_part, c.queries);
    std::memset(d.vertical, 0, width * sizeof(float));
    if (call.distances) std::memset(d.diagonal, 0, (width + each_part) * sizeof(float));
    for (int64_t done = top; done < bottom; done += at_once) {
      const int64_t M = std::min(at_once, bottom - done), step = up(M, 16) * kPanel;
      for (int64_t m = 0; m < M; m++) products.take_row(b, h, done + m, d.a + m * K);
      for (int64_t p = 0; p < panels; p++) products.multiply(M, d.a, unit, p, d.logits + p * step);
      const float scale = float(call.scale);
      for (int64_t m = 0; m < M; m++) {
        float* row = d.logits + m * kPanel;
        if (!(scale > 0.f))  // then the greatest logit is not that of the greatest product
          for (int64_t p = 0; p < panels; p++)
            for (int64_t j = 0; j < kPanel; j += kWide) *(vec*)(row + p * step + j) *= scale;
        const int64_t position = call.first + done + m;
        const int64_t end = std::min(call.seen, call.causal ? position + 1 : c.keys), begin = call.window ? position - call.window + 1 : 0;
        vec greatest = vec{} - INFINITY;
        for (int64_t p = 0; p < panels; p++)
          for (int64_t j = 0; j < kPanel; j += kWide) {
            vec& x = *(vec*)(row + p * step + j);
            const int64_t at = p * kPanel + j;
            if (at < begin || at + kWide > end)
              for (int64_t l = 0; l < kWide; l++) if (at + l < begin || at + l >= end) x[l] = -INFINITY;
            greatest = x > greatest ? x : greatest;
          }
        const float share = softmax(row, panels, step, greatest, scale > 0.f ? scale : 1.f) * float(call.share);
        if (share == 0.f) continue;
        float* diagonal = call.distances ? d.diagonal + each_part - 1 - (done + m - top) : nullptr;
        for (int64_t p = 0; p < panels; p++)
          for (int64_t j = 0; j < kPanel; j += kWide) {
            const vec w = *(const vec*)(row + p * step + j) * share;
            *(vec*)(d.vertical + p * kPanel + j) += w;
            if (diagonal) *(vec*)(diagonal + p * kPanel + j) += w;
          }
      }
    }
    std::copy_n(d.vertical, c.keys, call.vertical + task * c.keys);
    if (!call.distances) return;
    float* slash = call.slash + task * call.distances;
    std::fill_n(slash, call.distances, 0.f);
    for (int64_t t = 0; t < c.keys + each_part - 1; t++) {  // key minus row of the part is t - (each_part - 1)
      const int64_t distance = call.first + top - (t - (each_part - 1)), line = distance < 0 ? -distance : distance;
      if (line < call.distances && (distance >= 0 || !call.causal)) slash[line] += d.diagonal[t];
    }
  });
}

}  // namespace

extern "C" {

// Every row of q with every row of k, [B, Hq, queries, keys].
struct ProductCall {
  Tokens tokens;
  float* out;
};

// Means of blocks of tokens, and how alike the tokens of a block are.
struct MeanCall {
  Team team;
  int64_t batch, heads, x_heads, tokens, dim, block, lead, padded, type;
  int64_t step[3], index_step[2];  // of batch, heads, tokens; of batch, heads
  const void* x;
  const int32_t* index;  // [B, H, N]; null: in order
  const float* centre;   // [B, H, D], taken from every token; null: nothing is
  const float* guide;    // [B, guides, D], with which every token is multiplied; null: it is not
  int64_t guides;
  float *mean, *alike;   // [B, H, blocks, D]; [B, H, blocks], then of tokens divided by their lengths; null: not asked for
  float* products;       // [B, H, N], of tokens with a guide
};

// The keys of a row by falling score, in 256 steps of which those of one stay in order.
struct OrderCall {
  Team team;
  int64_t rows, groups, keys, until, segment, count, out_row, out_group;  // rows of all heads, and of one
  const float* scores;                                                    // [rows, keys]
  int32_t* out;                                                           // [rows / groups, groups, count]
};

// The blocks that hold a share of their row, heaviest first.
struct ShareCall {
  Team team;
  int64_t batch, heads, rows, cols, crossing;
  int64_t value_step[4], forced_step[4], there_step[4], always_step[4], mass_step;
  const float *values, *mass;  // [B, H, rows, cols], [H]
  const uint8_t *forced, *there, *always;  // forced may be null
  uint8_t* keep;
};

}

namespace {

template <typename X>
int multiply_all(const ProductCall& call) {
  const Tokens& c = call.tokens;
  Products<X> products(c, false);
  const int64_t panels = products.panels, K = products.K, parts = (c.queries + kAtOnce - 1) / kAtOnce;
  struct Desk { X* a; float* logits; };
  auto desk = [&](Arena& a) { return Desk{a.take<X>(kAtOnce * K), a.take<float>(kAtOnce * kPanel)}; };
  Arena each{nullptr};
  desk(each);
  return products.run(c.batch * c.q_heads * parts, each.used, [&](int64_t task, char* mine) {
    Arena a{mine};
    Desk d = desk(a);
    const int64_t part = task % parts, b = task / parts / c.q_heads, h = task / parts % c.q_heads, first = part * kAtOnce;
    const int64_t M = std::min(kAtOnce, c.queries - first), unit = b * c.kv_heads + h * c.kv_heads / c.q_heads;
    for (int64_t m = 0; m < M; m++) products.take_row(b, h, first + m, d.a + m * K);
    float* out = call.out + ((b * c.q_heads + h) * c.queries + first) * c.keys;
    for (int64_t p = 0; p < panels; p++) {
      products.multiply(M, d.a, unit, p, d.logits);
      for (int64_t m = 0; m < M; m++)
        std::copy_n(d.logits + m * kPanel, std::min(kPanel, c.keys - p * kPanel), out + m * c.keys + p * kPanel);
    }
  });
}

constexpr int64_t kTokens = 64;  // that are added one after another, before their sum is added to the others

template <typename T>
void means(const MeanCall& c) {
  const int64_t blocks = (c.lead + c.tokens + c.block - 1) / c.block;
  share_out(c.team, c.batch * c.heads * blocks, 8, [&](int64_t task) {
    const int64_t b = task / blocks / c.heads, h = task / blocks % c.heads, at = task % blocks * c.block - c.lead;
    const int64_t begin = std::max<int64_t>(at, 0), end = std::min(at + c.block, c.tokens);
    const T* x = (const T*)c.x + b * c.step[0] + h * c.x_heads / c.heads * c.step[1];
    const int32_t* index = c.index ? c.index + b * c.index_step[0] + h * c.index_step[1] : nullptr;
    const float* centre = c.centre ? c.centre + (b * c.heads + h) * c.dim : nullptr;
    const float* guide = c.guide ? c.guide + (b * c.guides + h * c.guides / c.heads) * c.dim : nullptr;
    float* mean = c.mean + task * c.dim;
    std::fill_n(mean, c.dim, 0.f);
    for (int64_t first = begin; first < end; first += kTokens) {
      const int64_t n = std::min(kTokens, end - first);
      const T* row[kTokens];
      float factor[kTokens];
      for (int64_t t = 0; t < n; t++) {
        row[t] = x + (index ? index[first + t] : first + t) * c.step[2];
        factor[t] = 1.f;
        float squares[kWide] = {}, sums[kWide] = {};
        if (guide) {
          for (int64_t d = 0; d < c.dim; d += kWide)
            for (int64_t l = 0; l < std::min<int64_t>(kWide, c.dim - d); l++) sums[l] += wide(row[t][d + l]) * guide[d + l];
          c.products[(b * c.heads + h) * c.tokens + first + t] = std::accumulate(sums, sums + kWide, 0.f);
        }
        if (!c.alike) continue;
        for (int64_t d = 0; d < c.dim; d += kWide)
          for (int64_t l = 0; l < std::min<int64_t>(kWide, c.dim - d); l++) {
            const float y = wide(row[t][d + l]) - (centre ? centre[d + l] : 0.f);
            squares[l] += y * y;
          }
        const float length = std::sqrt(std::accumulate(squares, squares + kWide, 0.f));
        factor[t] = length == 0.f ? 1.f : 1.f / length;
      }
      for (int64_t d = 0; d < c.dim; d += kWide) {
        float sum[kWide] = {};
        const int64_t some = std::min<int64_t>(kWide, c.dim - d);
        for (int64_t t = 0; t < n; t++)
          if (some == kWide) for (int l = 0; l < kWide; l++) sum[l] += (wide(row[t][d + l]) - (centre ? centre[d + l] : 0.f)) * factor[t];
          else for (int64_t l = 0; l < some; l++) sum[l] += (wide(row[t][d + l]) - (centre ? centre[d + l] : 0.f)) * factor[t];
        for (int64_t l = 0; l < some; l++) mean[d + l] += sum[l];
      }
    }
    const float count = float(c.padded ? c.block : end - begin);
    float square = 0.f;
    for (int64_t d = 0; d < c.dim; d++) { mean[d] /= count; square += mean[d] * mean[d]; }
    if (c.alike) c.alike[task] = square > 1.f ? 1.f : square;
  });
}

}  // namespace

extern "C" {


int blocksparse_means(const MeanCall* c) {
  if (c->type == 0) means<float>(*c); else if (c->type == 1) means<bf16>(*c); else means<half>(*c);
  return 0;
}

// As `score_steps` has it, operation by operation, then a counting sort.
int blocksparse_order(const OrderCall* call) {
  const OrderCall& c = *call;
  constexpr int kSteps = 256, kSampled = 8;
  uint8_t* all = (uint8_t*)allocate(c.rows * c.keys);
  if (!all) return 1;
  share_out(c.team, c.rows, 1, [&](int64_t row) {
    const float *score = c.scores + row * c.keys, most = FLT_MAX;
    int32_t* out = c.out + row / c.groups * c.out_row + row % c.groups * c.out_group;
    uint8_t* step = all + row * c.keys;
    const int64_t n = std::clamp<int64_t>(c.until + row % c.groups * c.segment, 0, c.keys);
    float high = -INFINITY, minus_low = -INFINITY;
    for (int64_t j = kSampled - 1; j < n; j += kSampled)
      if (std::isfinite(score[j])) { high = std::max(high, score[j]); minus_low = std::max(minus_low, -score[j]); }
    const float width = high + minus_low;
    const bool spread = width > 0.f && width <= most;
    const float factor = spread ? std::min(kSteps / width, most) : 0.f, from = spread ? high : 0.f;
    int64_t place[kSteps + 1] = {};
    for (int64_t j = 0; j < n; j++) {
      const float x = score[j], finite = x != x ? -most : std::min(std::max(x, -most), most);
      step[j] = uint8_t(std::min(std::max((from - finite) * factor, 0.f), float(kSteps - 1)));
      place[step[j] + 1]++;
    }
    for (int i = 0; i < kSteps; i++) place[i + 1] += place[i];
    for (int64_t j = 0; j < n; j++)
      if (const int64_t i = place[step[j]]++; i < c.count) out[i] = int32_t(j);
    if (n < c.count) std::fill_n(out + n, c.count - n, -1);
  });
  std::free(all);
  return 0;
}

// As `running_share` has it: integers that stand for the weights, and shares of their sum in fp64, rounded to fp32.
int blocksparse_shares(const ShareCall* call) {
  const ShareCall& c = *call;
  const int64_t each = up(c.cols * 12, 64);
  char* desks = allocate(each * c.team.threads);
  if (!desks) return 1;
  std::atomic<int64_t> desk{0}, next{0};
  void* state = c.team.release ? c.team.release() : nullptr;
  together(c.team, [&] {
    uint64_t* heap = (uint64_t*)(desks + desk.fetch_add(1) * each);  // rank in the upper half, then lower columns first
    uint32_t* ticks = (uint32_t*)(heap + c.cols);
    for (int64_t t; (t = next.fetch_add(1)) < c.batch * c.heads * c.rows;) {
      const int64_t b = t / c.rows / c.heads, h = t / c.rows % c.heads, r = t % c.rows;
      auto entry = [&](auto* x, const int64_t* step) { return x + b * step[0] + h * step[1] + r * step[2]; };
      const float* value = entry(c.values, c.value_step);
      const uint8_t *there = entry(c.there, c.there_step), *always = entry(c.always, c.always_step);
      const uint8_t* forced = c.forced ? entry(c.forced, c.forced_step) : nullptr;
      uint8_t* keep = c.keep + t * c.cols;
      const float mass = c.mass[h * c.mass_step];
      auto weight = [&](int64_t j) {
        const float x = there[j * c.there_step[3]] ? value[j * c.value_step[3]] : 0.f;
        return x > 0.f ? std::min(x, FLT_MAX) : 0.f;  // NaN is nothing
      };
      float heaviest = 0.f;
      for (int64_t j = 0; j < c.cols; j++) heaviest = std::max(heaviest, weight(j));
      int exponent;
      std::frexp(heaviest, &exponent);
      const double scale = std::ldexp(1.0, 30 - exponent);
      int64_t total = 0, first = 0, reached = 0;
      for (int64_t j = 0; j < c.cols; j++) {
        ticks[j] = uint32_t(std::nearbyint(double(weight(j)) * scale));
        total += ticks[j];
        const bool at_once = forced && forced[j * c.forced_step[3]];
        first += at_once;
        heap[j] = uint64_t(at_once ? UINT32_MAX : ticks[j]) << 32 | (UINT32_MAX - uint32_t(j));
        keep[j] = always[j * c.always_step[3]] || mass >= 1.f;
      }
      std::make_heap(heap, heap + c.cols);
      for (int64_t n = c.cols, rank = 0; n > 0; n--, rank++) {
        std::pop_heap(heap, heap + n);
        const int64_t j = UINT32_MAX - uint32_t(heap[n - 1]), before = reached;
        reached += ticks[j];
        const bool crosses = float(double(before) / double(total)) < mass, within = float(double(reached) / double(total)) <= mass;
        const bool best = rank == first && ticks[j] > 0;
        if (c.crossing ? crosses : within || best) keep[j] = 1;
        else if (rank >= first) break;  // shares only grow
      }
    }
  });
  if (c.team.acquire) c.team.acquire(state);
  std::free(desks);
  return 0;
}

#if defined(MULTIPLIES_BF16)
#define FOR_TYPE(function, call) (call.tokens.type == 1 ? function<bf16>(call) : function<float>(call))
#else
#define FOR_TYPE(function, call) function<float>(call)
#endif

// 0, or 1 if there is no memory.
int blocksparse_strided_mass(const StridedMassCall* call) { return FOR_TYPE(strided_mass, (*call)); }
int blocksparse_last_query_weights(const LastQueriesCall* call) { return FOR_TYPE(last_query_weights, (*call)); }
int blocksparse_products(const ProductCall* call) { return FOR_TYPE(multiply_all, (*call)); }

}  // extern "C"
