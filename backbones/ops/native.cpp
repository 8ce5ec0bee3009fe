// CPU kernels of backbones.ops, forward and backward, for float and bfloat16 tokens.
//
// A plain C interface: `native_operators.cpp` allocates, checks and calls. Tokens are contiguous,
// (B, T, C) with channels last; parameters, statistics and every sum are float. B samples, T tokens,
// C channels; an index of T in a table is a row of zeros. Every pair has its arguments in one order:
// forward(inputs, tables and sizes, result, tensors saved for backward) and backward(gradient, inputs,
// saved tensors, tables and sizes, gradients of the inputs); unnamed arguments are not read.
//
// Tasks write to disjoint memory, and sums over samples are split into a number of parts that depends
// on the shapes alone, so results do not depend on the number of threads. Vectors use the extension of
// g++ and clang, which they lower to the CPU's instructions.
//
// Do not compile with -ffast-math: an infinite key removes a token, and a NaN must stay NaN.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

// The OpenMP library that torch has loaded: a second thread pool would compete with its threads. Null
// if torch has none with this interface.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Int __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Half __attribute__((vector_size(2 * W)));

// ---------------------------------------------------------------- memory

struct bfloat16 {
  uint16_t bits;
};

inline Vec all(float x) { return x - Vec{}; }

inline Vec widen(Half h) { return (Vec)(__builtin_convertvector(h, Bits) << 16); }

// Round to nearest, ties to even; a NaN stays a NaN.
inline Half narrow(Vec x) {
  Bits b = (Bits)x;
  Bits rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  rounded = x == x ? rounded : (b >> 16) | 0x40u;
  return __builtin_convertvector(rounded, Half);
}

inline float value(float x) { return x; }
inline float value(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// The first `n` values, zeros after them; `FULL` promises that there are W.
template <bool FULL, class T>
inline Vec load(const T* p, int64_t n = W) {
  if (FULL || n >= W) {
    if constexpr (sizeof(T) == 4) {
      Vec v;
      memcpy(&v, p, sizeof v);
      return v;
    } else {
      Half h;
      memcpy(&h, p, sizeof h);
      return widen(h);
    }
  }
  float part[W] = {};
  for (int64_t i = 0; i < n; i++) part[i] = value(p[i]);
  return load<true>(part);
}

template <bool FULL, class T>
inline void store(T* p, Vec v, int64_t n = W) {
  if constexpr (sizeof(T) == 4) {
    if (FULL || n >= W) memcpy(p, &v, sizeof v);
    else if (n > 0) memcpy(p, &v, 4 * n);
  } else {
    Half h = narrow(v);
    if (FULL || n >= W) memcpy(p, &h, sizeof h);
    else if (n > 0) memcpy(p, &h, 2 * n);
  }
}

// Scratch memory of this thread, reused from task to task.
float* scratch(int64_t floats) {
  static thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

// ---------------------------------------------------------------- functions

// e^x to 2 units in the last place on [-87, 88], clamped there: results are never denormal.
inline Vec exponential(Vec x) {
  x = x < -87.f ? all(-87.f) : x;
  x = x > 88.f ? all(88.f) : x;
  // x = n ln 2 + r; adding 127.5 makes truncation a rounding and n the exponent's bits.
  Int n = __builtin_convertvector(x * 1.44269504f + 127.5f, Int);
  Vec whole = __builtin_convertvector(n, Vec) - 127.f;
  Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  // (e^r - 1 - r) / r^2, fitted for |r| <= ln(2) / 2 to a relative error of 3e-9 of e^r.
  Vec p = r * 0.0013813145f + 0.008369419f;
  p = p * r + 0.041668456f;
  p = p * r + 0.16666515f;
  p = p * r + 0.49999994f;
  p = p * r * r + r + 1.f;
  return p * (Vec)(n << 23);
}

// The same with e^x = 0 below -87.
inline Vec vanishing(Vec x) { return x < -87.f ? Vec{} : exponential(x); }

inline Vec sigmoid(Vec x) { return 1.f / (1.f + exponential(-x)); }

inline Vec largest(Vec a, Vec b) { return a > b ? a : b; }

// Over the lanes: halves are added until four are left.
inline float sum(Vec v) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight eight[W / 8];
  memcpy(eight, &v, sizeof v);
  if (W == 16) eight[0] += eight[W / 8 - 1];
  Four four[2];
  memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
}

// ---------------------------------------------------------------- threads

// Denormal numbers count as 0 while a task runs: they cost a hundred times as much as others.
struct NoDenormals {
#if defined(__SSE2__)
  unsigned before = _mm_getcsr();
  NoDenormals() { _mm_setcsr(before | 0x8040); }
  ~NoDenormals() { _mm_setcsr(before); }
#endif
};

template <class Body>
void parallel(int64_t tasks, int64_t threads, const Body& body) {
  struct Job {
    const Body& body;
    int64_t tasks;
    std::atomic<int64_t> next{0};
  } job{body, tasks};
  auto run = [](void* given) {
    NoDenormals guard;
    Job& job = *static_cast<Job*>(given);
    for (int64_t i; (i = job.next++) < job.tasks;) job.body(i);
  };
  threads = std::min(threads, tasks);
  if (threads > 1 && GOMP_parallel) GOMP_parallel(run, &job, unsigned(threads), 0);
  else run(&job);
}

// Samples (or rows) cut into at most `most` parts, each summed on its own.
struct Parts {
  int64_t total, count;
  Parts(int64_t total, int64_t most) : total(total), count(std::max<int64_t>(1, std::min(total, most))) {}
  int64_t begin(int64_t part) const { return total * part / count; }
  int64_t end(int64_t part) const { return total * (part + 1) / count; }
};
constexpr int64_t PARTS = 32;

// Add up (parts, n) rows, in order.
void add_parts(const float* rows, int64_t parts, int64_t n, float* out) {
  std::fill(out, out + n, 0.f);
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < n; i++) out[i] += rows[part * n + i];
}

// Channels are walked in blocks of K vectors, all tokens of one block before the next.
constexpr int K = 2;
constexpr int BLOCK = K * W;
inline int64_t blocks(int64_t channels) { return (channels + BLOCK - 1) / BLOCK; }

// ---------------------------------------------------------------- value by value

constexpr int64_t PIECE = 1 << 14;

template <class Body>
void pieces(int64_t n, int64_t threads, const Body& body) {
  parallel((n + PIECE - 1) / PIECE, threads, [&](int64_t piece) {
    int64_t end = std::min(n, (piece + 1) * PIECE);
    for (int64_t i = piece * PIECE; i < end; i += W) body(i, end - i);
  });
}

// GELU in its tanh form: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) is the same function.
constexpr float SLOPE = 1.5957691216f, CUBE = 0.044715f;

template <class T>
void gelu_forward(const T* x, int64_t n, T* y, int64_t threads) {
  pieces(n, threads, [&](int64_t i, int64_t left) {
    Vec v = load<false>(x + i, left);
    store<false>(y + i, v * sigmoid(SLOPE * v * (1.f + CUBE * v * v)), left);
  });
}

template <class T>
void gelu_backward(const T* dy, const T* x, int64_t n, T* dx, int64_t threads) {
  pieces(n, threads, [&](int64_t i, int64_t left) {
    Vec v = load<false>(x + i, left), square = CUBE * v * v;
    Vec s = sigmoid(SLOPE * v * (1.f + square));
    Vec slope = s + v * s * (1.f - s) * SLOPE * (1.f + 3.f * square);
    store<false>(dx + i, load<false>(dy + i, left) * slope, left);
  });
}

template <class T>
void squared_relu_forward(const T* x, int64_t n, T* y, int64_t threads) {
  pieces(n, threads, [&](int64_t i, int64_t left) {
    Vec v = load<false>(x + i, left);
    v = v < 0.f ? Vec{} : v;
    store<false>(y + i, v * v, left);
  });
}

template <class T>
void squared_relu_backward(const T* dy, const T* x, int64_t n, T* dx, int64_t threads) {
  pieces(n, threads, [&](int64_t i, int64_t left) {
    Vec v = load<false>(x + i, left);
    store<false>(dx + i, load<false>(dy + i, left) * 2.f * (v < 0.f ? Vec{} : v), left);
  });
}

template <class T>
void sigmoid_gate_forward(const T* x, const T* y, int64_t n, T* out, int64_t threads) {
  pieces(n, threads, [&](int64_t i, int64_t left) {
    store<false>(out + i, sigmoid(load<false>(x + i, left)) * load<false>(y + i, left), left);
  });
}

template <class T>
void sigmoid_gate_backward(const T* grad, const T* x, const T* y, int64_t n, T* dx, T* dy,
                           int64_t threads) {
  pieces(n, threads, [&](int64_t i, int64_t left) {
    Vec gate = sigmoid(load<false>(x + i, left)), through = load<false>(grad + i, left) * gate;
    store<false>(dx + i, through * load<false>(y + i, left) * (1.f - gate), left);
    store<false>(dy + i, through, left);
  });
}

// ---------------------------------------------------------------- adaLN and the gated residual

// Where token t of a scan order lies in the stream: `perm` is (T,), or (B T,) rows of all samples.
struct Order {
  const int64_t* perm;
  int64_t each, tokens;
  int64_t at(int64_t sample, int64_t t) const {
    if (!perm) return sample * tokens + t;
    return each ? perm[sample * tokens + t] : sample * tokens + perm[t];
  }
};

inline Vec first(Vec v, int64_t n) {
  for (int64_t i = n; i < W; i++) v[i] = 0.f;
  return v;
}

// LayerNorm(x) (1 + scale) + shift of a float stream, in the scan order and the branch's type. Row
// `sample` of the shift and of the scale lies `stride` behind the one before.
template <class T>
void adaln_forward(const float* x, const float* shift, const float* scale, int64_t stride, float eps,
                   const int64_t* perm, int64_t each, int64_t B, int64_t tokens, int64_t C, T* out,
                   float* mean, float* rstd, int64_t threads) {
  Order order{perm, each, tokens};
  parallel(B, threads, [&](int64_t sample) {
    const float *add = shift + sample * stride, *factor = scale + sample * stride;
    for (int64_t t = 0; t < tokens; t++) {
      int64_t source = order.at(sample, t);
      const float* row = x + source * C;
      T* into = out + (sample * tokens + t) * C;
      Vec total{}, power{};
      for (int64_t c = 0; c < C; c += W) total += load<false>(row + c, C - c);
      float m = mean[source] = sum(total) / C;
      for (int64_t c = 0; c < C; c += W) {
        Vec v = first(load<false>(row + c, C - c) - m, C - c);
        power += v * v;
      }
      float r = rstd[source] = 1.f / std::sqrt(sum(power) / C + eps);
      for (int64_t c = 0; c < C; c += W) {
        Vec unit = (load<false>(row + c, C - c) - m) * r;
        Vec v = unit * (1.f + load<false>(factor + c, C - c)) + load<false>(add + c, C - c);
        store<false>(into + c, v, C - c);
      }
    }
  });
}

template <class T>
void adaln_backward(const T* grad, const float* x, const float*, const float* scale,
                    const float* mean, const float* rstd, int64_t stride, float,
                    const int64_t* perm, int64_t each, int64_t B, int64_t tokens, int64_t C,
                    float* dx, float* dshift, float* dscale, int64_t threads) {
  Order order{perm, each, tokens};
  parallel(B, threads, [&](int64_t sample) {
    int64_t wide = (C + W - 1) / W * W;
    float *sums = scratch(4 * wide), *products = sums + wide, *units = products + wide;
    float* inners = units + wide;
    const float* factor = scale + sample * stride;
    std::fill(sums, sums + 2 * wide, 0.f);
    for (int64_t t = 0; t < tokens; t++) {
      int64_t source = order.at(sample, t);
      float m = mean[source], r = rstd[source];
      Vec total{}, along{};
      for (int64_t c = 0; c < C; c += W) {
        Vec g = load<false>(grad + (sample * tokens + t) * C + c, C - c);
        Vec unit = (load<false>(x + source * C + c, C - c) - m) * r;
        Vec product = g * unit, gain = 1.f + load<false>(factor + c, C - c), inner = g * gain;
        store<true>(sums + c, load<true>(sums + c) + g);
        store<true>(products + c, load<true>(products + c) + product);
        store<true>(units + c, unit);
        store<true>(inners + c, inner);
        total += inner;
        along += product * gain;
      }
      float shared = sum(total) / C, slope = sum(along) / C;
      for (int64_t c = 0; c < C; c += W) {
        Vec v = load<true>(inners + c) - shared - load<true>(units + c) * slope;
        store<false>(dx + source * C + c, v * r, C - c);
      }
    }
    std::copy(sums, sums + C, dshift + sample * C);
    std::copy(products, products + C, dscale + sample * C);
  });
}

// x + gate y: a float stream, and a branch in the scan order and a type of its own.
template <class T>
void gated_sum_forward(const float* x, const float* gate, const T* y, int64_t stride,
                       const int64_t* perm, int64_t each, int64_t B, int64_t tokens, int64_t C,
                       float* out, int64_t threads) {
  Order order{perm, each, tokens};
  parallel(B, threads, [&](int64_t sample) {
    for (int64_t t = 0; t < tokens; t++) {
      int64_t target = order.at(sample, t) * C, source = (sample * tokens + t) * C;
      for (int64_t c = 0; c < C; c += W) {
        Vec v = load<false>(gate + sample * stride + c, C - c) * load<false>(y + source + c, C - c);
        store<false>(out + target + c, load<false>(x + target + c, C - c) + v, C - c);
      }
    }
  });
}

template <class T>
void gated_sum_backward(const float* grad, const float* gate, const T* y, int64_t stride,
                        const int64_t* perm, int64_t each, int64_t B, int64_t tokens, int64_t C,
                        float* dgate, T* dy, int64_t threads) {
  Order order{perm, each, tokens};
  parallel(B, threads, [&](int64_t sample) {
    int64_t wide = (C + W - 1) / W * W;
    float* sums = scratch(wide);
    std::fill(sums, sums + wide, 0.f);
    for (int64_t t = 0; t < tokens; t++) {
      int64_t target = order.at(sample, t) * C, source = (sample * tokens + t) * C;
      for (int64_t c = 0; c < C; c += W) {
        Vec g = load<false>(grad + target + c, C - c), v = load<false>(y + source + c, C - c);
        store<true>(sums + c, load<true>(sums + c) + g * v);
        store<false>(dy + source + c, g * load<false>(gate + sample * stride + c, C - c), C - c);
      }
    }
    std::copy(sums, sums + C, dgate + sample * C);
  });
}

// ---------------------------------------------------------------- RMSNorm(y silu(z)) weight

template <class T>
void gated_rms_forward(const T* y, const T* z, const float* weight, float eps, int64_t rows,
                       int64_t C, T* out, float* scale, int64_t threads) {
  Parts parts(rows, 4 * PARTS);
  parallel(parts.count, threads, [&](int64_t part) {
    float* gated = scratch(C + W);
    for (int64_t row = parts.begin(part); row < parts.end(part); row++) {
      Vec power{};
      for (int64_t c = 0; c < C; c += W) {
        Vec gate = load<false>(z + row * C + c, C - c);
        Vec v = load<false>(y + row * C + c, C - c) * gate * sigmoid(gate);
        power += v * v;
        store<true>(gated + c, v);
      }
      float s = scale[row] = 1.f / std::sqrt(sum(power) / C + eps);
      for (int64_t c = 0; c < C; c += W)
        store<false>(out + row * C + c, load<true>(gated + c) * s * load<false>(weight + c, C - c),
                     C - c);
    }
  });
}

template <class T>
void gated_rms_backward(const T* grad, const T* y, const T* z, const float* weight,
                        const float* scale, float, int64_t rows, int64_t C, T* dy, T* dz,
                        float* dweight, int64_t threads) {
  Parts parts(rows, 4 * PARTS);
  std::vector<float> partial(parts.count * C);
  parallel(parts.count, threads, [&](int64_t part) {
    int64_t wide = (C + W - 1) / W * W;
    float *sum_of = scratch(3 * wide), *sigmoids = sum_of + wide, *units = sigmoids + wide;
    std::fill(sum_of, sum_of + wide, 0.f);
    for (int64_t row = parts.begin(part); row < parts.end(part); row++) {
      const T *g = grad + row * C, *a = y + row * C, *b = z + row * C;
      float s = scale[row];
      Vec along{};
      for (int64_t c = 0; c < C; c += W) {
        Vec gate = load<false>(b + c, C - c), sig = sigmoid(gate);
        Vec unit = load<false>(a + c, C - c) * gate * sig * s;
        Vec dunit = load<false>(g + c, C - c) * unit;
        store<true>(sigmoids + c, sig);
        store<true>(units + c, unit);
        store<true>(sum_of + c, load<true>(sum_of + c) + dunit);
        along += dunit * load<false>(weight + c, C - c);
      }
      float mean = sum(along) / C;
      for (int64_t c = 0; c < C; c += W) {
        Vec gate = load<false>(b + c, C - c), sig = load<true>(sigmoids + c), silu = sig * gate;
        Vec inner = load<false>(g + c, C - c) * load<false>(weight + c, C - c);
        Vec dgated = (inner - load<true>(units + c) * mean) * s;
        store<false>(dy + row * C + c, dgated * silu, C - c);
        Vec slope = sig + silu * (1.f - sig);
        store<false>(dz + row * C + c, dgated * load<false>(a + c, C - c) * slope, C - c);
      }
    }
    std::copy(sum_of, sum_of + C, partial.data() + part * C);
  });
  add_parts(partial.data(), parts.count, C, dweight);
}

// ---------------------------------------------------------------- causal convolution, then SiLU

constexpr int TAPS = 8;
template <int N>
using Known = std::integral_constant<int, N>;

// Which token is at tap `tap` of token t, or T.
struct Taps {
  const int64_t* table;  // (1 or B, taps - 1, T), or null: the previous tokens
  int64_t taps, T, stride;
  Taps(const int64_t* table, int64_t each, int64_t taps, int64_t T)
      : table(table), taps(taps), T(T), stride(each ? (taps - 1) * T : 0) {}
  int64_t at(int64_t sample, int64_t tap, int64_t t) const {
    if (table) return table[sample * stride + (tap - 1) * T + t];
    return t >= tap ? t - tap : T;
  }
};

// WIDTH is the number of taps where it is known to the compiler, else 0.
template <bool FULL, int WIDTH, class T>
struct Conv {
  const T* x;
  const Taps& taps;
  int64_t C, left;
  Vec w[WIDTH ? WIDTH : TAPS][K], bias[K];
  int64_t width() const { return WIDTH ? WIDTH : taps.taps; }
  int vectors() const { return FULL ? K : int(std::min<int64_t>(K, (left + W - 1) / W)); }
  Conv(const T* x, const Taps& taps, const float* rows, const float* bias_row, int64_t C, int64_t c)
      : x(x + c), taps(taps), C(C), left(C - c) {
    for (int k = 0; k < K; k++) {
      for (int j = 0; j < width(); j++) w[j][k] = load<FULL>(rows + j * C + c + k * W, left - k * W);
      bias[k] = bias_row ? load<FULL>(bias_row + c + k * W, left - k * W) : Vec{};
    }
  }
  Vec token(int64_t sample, int64_t t, int k) const {
    return load<FULL>(x + (sample * taps.T + t) * C + k * W, left - k * W);
  }
  // The convolution at one token, and the tokens at its taps.
  void at(int64_t sample, int64_t t, int64_t* source, Vec* out) const {
    source[0] = t;
    for (int k = 0; k < vectors(); k++) out[k] = bias[k] + w[0][k] * token(sample, t, k);
    for (int j = 1; j < width(); j++) {
      source[j] = taps.at(sample, j, t);
      if (source[j] == taps.T) continue;
      for (int k = 0; k < vectors(); k++) out[k] += w[j][k] * token(sample, source[j], k);
    }
  }
};

template <class T>
void conv_forward(const T* x, const float* rows, const float* bias, const int64_t* table,
                  int64_t each, int64_t silu, int64_t B, int64_t tokens, int64_t C, int64_t width,
                  T* y, int64_t threads) {
  Taps taps(table, each, width, tokens);
  auto block = [&](auto full, auto known, int64_t sample, int64_t c) {
    constexpr bool FULL = decltype(full)::value;
    Conv<FULL, decltype(known)::value, T> conv(x, taps, rows, bias, C, c);
    for (int64_t t = 0; t < tokens; t++) {
      int64_t source[TAPS];
      Vec v[K];
      conv.at(sample, t, source, v);
      for (int k = 0; k < conv.vectors(); k++)
        store<FULL>(y + (sample * tokens + t) * C + c + k * W, silu ? v[k] * sigmoid(v[k]) : v[k],
                    C - c - k * W);
    }
  };
  parallel(B * blocks(C), threads, [&](int64_t task) {
    int64_t c = task % blocks(C) * BLOCK, sample = task / blocks(C);
    if (width != 4) block(std::false_type{}, Known<0>{}, sample, c);
    else c + BLOCK > C ? block(std::false_type{}, Known<4>{}, sample, c)
                       : block(std::true_type{}, Known<4>{}, sample, c);
  });
}

template <class T>
void conv_backward(const T* grad, const T* x, const float* rows, const float* bias,
                   const int64_t* table, int64_t each, int64_t silu, int64_t B, int64_t tokens,
                   int64_t C, int64_t width, T* dx, float* drows, float* dbias, int64_t threads) {
  Taps taps(table, each, width, tokens);
  Parts parts(B, PARTS);
  std::vector<float> partial(parts.count * (width + 1) * C);
  auto block = [&](auto full, auto known, int64_t part, int64_t c) {
    constexpr bool FULL = decltype(full)::value;
    constexpr int WIDTH = decltype(known)::value;
    Conv<FULL, WIDTH, T> conv(x, taps, rows, bias, C, c);
    Vec dw[WIDTH ? WIDTH : TAPS][K] = {}, db[K] = {};
    float* sums = scratch(tokens * BLOCK);
    for (int64_t sample = parts.begin(part); sample < parts.end(part); sample++) {
      std::fill(sums, sums + tokens * BLOCK, 0.f);
      for (int64_t t = 0; t < tokens; t++) {
        int64_t source[TAPS];
        Vec v[K];
        conv.at(sample, t, source, v);
        for (int k = 0; k < conv.vectors(); k++) {
          Vec g = load<FULL>(grad + (sample * tokens + t) * C + c + k * W, C - c - k * W);
          if (silu) {
            Vec s = sigmoid(v[k]);
            g *= s + v[k] * s * (1.f - s);
          }
          v[k] = g;
          db[k] += g;
        }
        for (int j = 0; j < conv.width(); j++) {
          if (source[j] == tokens) continue;
          float* into = sums + source[j] * BLOCK;
          for (int k = 0; k < conv.vectors(); k++) {
            dw[j][k] += v[k] * conv.token(sample, source[j], k);
            store<true>(into + k * W, load<true>(into + k * W) + v[k] * conv.w[j][k]);
          }
        }
      }
      for (int64_t t = 0; t < tokens; t++)
        for (int k = 0; k < conv.vectors(); k++)
          store<FULL>(dx + (sample * tokens + t) * C + c + k * W,
                      load<true>(sums + t * BLOCK + k * W), C - c - k * W);
    }
    float* row = partial.data() + part * (width + 1) * C + c;  // the last one is the bias
    for (int k = 0; k < conv.vectors(); k++) {
      for (int j = 0; j < conv.width(); j++) store<FULL>(row + j * C + k * W, dw[j][k], C - c - k * W);
      store<FULL>(row + width * C + k * W, db[k], C - c - k * W);
    }
  };
  parallel(parts.count * blocks(C), threads, [&](int64_t task) {
    int64_t c = task % blocks(C) * BLOCK, part = task / blocks(C);
    if (width != 4) block(std::false_type{}, Known<0>{}, part, c);
    else c + BLOCK > C ? block(std::false_type{}, Known<4>{}, part, c)
                       : block(std::true_type{}, Known<4>{}, part, c);
  });
  std::vector<float> total((width + 1) * C);
  add_parts(partial.data(), parts.count, (width + 1) * C, total.data());
  std::copy(total.begin(), total.end() - C, drows);
  if (bias) std::copy(total.end() - C, total.end(), dbias);
}

// ---------------------------------------------------------------- token shift and its mixtures

// out_m = other + (x - other) mix_m, quarter q of `other` read at neighbours[q].
template <class T>
void shift_mix_forward(const T* x, const float* mix, const int64_t* neighbours, int64_t each,
                       int64_t B, int64_t tokens, int64_t C, int64_t M, T* const* out,
                       int64_t threads) {
  int64_t quarter = C / 4;
  parallel(B, threads, [&](int64_t sample) {
    const int64_t* table = neighbours + (each ? sample * 4 * tokens : 0);
    const T* rows = x + sample * tokens * C;
    for (int64_t t = 0; t < tokens; t++)
      for (int q = 0; q < 4; q++) {
        int64_t source = table[q * tokens + t];
        for (int64_t c = 0; c < quarter; c += W) {
          int64_t at = q * quarter + c, left = quarter - c;
          Vec own = load<false>(rows + t * C + at, left);
          Vec other = source < tokens ? load<false>(rows + source * C + at, left) : Vec{};
          for (int64_t m = 0; m < M; m++)
            store<false>(out[m] + (sample * tokens + t) * C + at,
                         other + (own - other) * load<false>(mix + m * C + at, left), left);
        }
      }
  });
}

template <class T>
void shift_mix_backward(const T* const* grad, const T* x, const float* mix,
                        const int64_t* neighbours, int64_t each, int64_t B, int64_t tokens,
                        int64_t C, int64_t M, T* dx, float* dmix, int64_t threads) {
  int64_t quarter = C / 4, wide = (quarter + W - 1) / W * W;
  Parts parts(B, PARTS);
  std::vector<float> partial(parts.count * M * C);
  parallel(parts.count, threads, [&](int64_t part) {
    float* sums = scratch((tokens + M) * 4 * wide);  // (T, 4, wide), then (M, 4, wide)
    float* dm = sums + tokens * 4 * wide;
    std::fill(dm, dm + M * 4 * wide, 0.f);
    for (int64_t sample = parts.begin(part); sample < parts.end(part); sample++) {
      const int64_t* table = neighbours + (each ? sample * 4 * tokens : 0);
      const T* rows = x + sample * tokens * C;
      std::fill(sums, dm, 0.f);
      for (int64_t t = 0; t < tokens; t++)
        for (int q = 0; q < 4; q++) {
          int64_t source = table[q * tokens + t];
          for (int64_t c = 0; c < quarter; c += W) {
            int64_t at = q * quarter + c, left = quarter - c, place = q * wide + c;
            Vec own = load<false>(rows + t * C + at, left);
            Vec away = source < tokens ? own - load<false>(rows + source * C + at, left) : own;
            Vec to_own{}, total{};
            for (int64_t m = 0; m < M; m++) {
              Vec g = load<false>(grad[m] + (sample * tokens + t) * C + at, left);
              total += g;
              to_own += g * load<false>(mix + m * C + at, left);
              float* row = dm + m * 4 * wide + place;
              store<true>(row, load<true>(row) + g * away);
            }
            float* into = sums + t * 4 * wide + place;
            store<true>(into, load<true>(into) + to_own);
            if (source == tokens) continue;
            into = sums + source * 4 * wide + place;
            store<true>(into, load<true>(into) + (total - to_own));
          }
        }
      for (int64_t t = 0; t < tokens; t++)
        for (int q = 0; q < 4; q++)
          for (int64_t c = 0; c < quarter; c += W)
            store<false>(dx + (sample * tokens + t) * C + q * quarter + c,
                         load<true>(sums + (t * 4 + q) * wide + c), quarter - c);
    }
    for (int64_t m = 0; m < M; m++)
      for (int q = 0; q < 4; q++)
        std::copy_n(dm + (m * 4 + q) * wide, quarter,
                    partial.data() + (part * M + m) * C + q * quarter);
  });
  add_parts(partial.data(), parts.count, M * C, dmix);
}

// ---------------------------------------------------------------- bidirectional WKV

// Decays of K vectors of channels over the gap before a token.
struct Decay {
  Vec rate[K], one[K];
  template <bool FULL>
  void read(const float* decay, int64_t left) {
    for (int k = 0; k < K; k++) {
      rate[k] = load<FULL>(decay + k * W, left - k * W);
      one[k] = exponential(-rate[k]);
    }
  }
  // What a sum keeps over `gap` positions, and what the nearest token adds to it.
  void over(int64_t gap, int k, Vec& keep, Vec& add) const {
    add = gap == 1 ? all(1.f) : exponential(-rate[k] * float(gap - 1));
    keep = gap == 1 ? one[k] : add * one[k];
  }
};

inline int64_t gap_before(const int64_t* position, int64_t t, int64_t tokens) {
  return position && t > 0 && t < tokens ? position[t] - position[t - 1] : 1;
}

// Both sums over the tokens before (then after) each one, as a recurrence from token to token.
// out = above / below. For the way back (null together: there is none): the same unrounded, which may
// be `out` itself, 1 / below, (before_above - out before_below) / below, the largest key of a channel.
template <class T>
void biwkv_forward(const T* key, const T* val, const float* decay, const float* bonus,
                   const int64_t* positions, int64_t each, int64_t, int64_t B, int64_t tokens,
                   int64_t C, T* out, float* y, float* inverse, float* slope, float* top,
                   int64_t threads) {
  auto block = [&](auto full, int64_t sample, int64_t c) {
    constexpr bool FULL = decltype(full)::value;
    const int64_t* position = positions ? positions + (each ? sample * tokens : 0) : nullptr;
    int64_t start = sample * tokens * C + c, left = C - c;
    Decay d;
    d.read<FULL>(decay + c, left);
    Vec most[K], u[K], above[K] = {}, below[K] = {};
    for (int k = 0; k < K; k++) {
      u[k] = load<FULL>(bonus + c + k * W, left - k * W);
      most[k] = load<FULL>(key + start + k * W, left - k * W);
      for (int64_t t = 1; t < tokens; t++)
        most[k] = largest(most[k], load<FULL>(key + start + t * C + k * W, left - k * W));
      if (top) store<FULL>(top + sample * C + c + k * W, most[k], left - k * W);
    }
    float* kept = scratch(tokens * 3 * BLOCK);
    for (int64_t t = 0; t < tokens; t++) {
      int64_t gap = gap_before(position, t + 1, tokens);
      for (int k = 0; k < K; k++) {
        Vec keep, add;
        d.over(gap, k, keep, add);
        Vec e = vanishing(load<FULL>(key + start + t * C + k * W, left - k * W) - most[k]);
        Vec v = load<FULL>(val + start + t * C + k * W, left - k * W);
        float* row = kept + (t * K + k) * 3 * W;
        store<true>(row, e);
        store<true>(row + W, above[k]);
        store<true>(row + 2 * W, below[k]);
        above[k] = keep * above[k] + add * (e * v);
        below[k] = keep * below[k] + add * e;
      }
    }
    for (int k = 0; k < K; k++) above[k] = below[k] = Vec{};
    for (int64_t t = tokens - 1; t >= 0; t--) {
      int64_t gap = gap_before(position, t, tokens);
      for (int k = 0; k < K; k++) {
        Vec keep, add;
        d.over(gap, k, keep, add);
        const float* row = kept + (t * K + k) * 3 * W;
        int64_t at = start + t * C + k * W, n = left - k * W;
        Vec e = load<true>(row), before_above = load<true>(row + W), before_below = load<true>(row + 2 * W);
        Vec ev = e * load<FULL>(val + at, n);
        Vec over = 1.f / (before_below + below[k] + u[k] * e);
        Vec mean = (before_above + above[k] + u[k] * ev) * over;
        store<FULL>(out + at, mean, n);
        if (inverse) {
          if (sizeof(T) == 2) store<FULL>(y + at, mean, n);
          store<FULL>(inverse + at, over, n);
          store<FULL>(slope + at, (before_above - mean * before_below) * over, n);
        }
        above[k] = keep * above[k] + add * ev;
        below[k] = keep * below[k] + add * e;
      }
    }
  };
  parallel(B * blocks(C), threads, [&](int64_t task) {
    int64_t c = task % blocks(C) * BLOCK, sample = task / blocks(C);
    c + BLOCK <= C ? block(std::true_type{}, sample, c) : block(std::false_type{}, sample, c);
  });
}

// The operator is symmetric: the same recurrences, applied to a = dy / below and to -a y.
template <class T>
void biwkv_backward(const T* grad, const T* key, const T* val, const float* decay,
                    const float* bonus, const float* y, const float* inverse, const float* slope,
                    const float* top, const int64_t* positions, int64_t each, int64_t length,
                    int64_t B, int64_t tokens, int64_t C, T* dkey, T* dval, float* ddecay,
                    float* dbonus, int64_t threads) {
  Parts parts(B, PARTS);
  std::vector<float> partial(parts.count * 2 * C);
  float centre = (length - 1) / 2.f;
  auto block = [&](auto full, int64_t part, int64_t c) {
    constexpr bool FULL = decltype(full)::value;
    int64_t left = C - c;
    Decay d;
    d.read<FULL>(decay + c, left);
    Vec u[K], dd[K] = {}, du[K] = {};
    for (int k = 0; k < K; k++) u[k] = load<FULL>(bonus + c + k * W, left - k * W);
    float* kept = scratch(tokens * 2 * BLOCK);
    for (int64_t sample = parts.begin(part); sample < parts.end(part); sample++) {
      const int64_t* position = positions ? positions + (each ? sample * tokens : 0) : nullptr;
      int64_t start = sample * tokens * C + c;
      Vec first[K] = {}, second[K] = {};
      for (int64_t t = 0; t < tokens; t++) {
        int64_t gap = gap_before(position, t + 1, tokens);
        for (int k = 0; k < K; k++) {
          Vec keep, add;
          d.over(gap, k, keep, add);
          int64_t at = start + t * C + k * W, n = left - k * W;
          Vec a = load<FULL>(grad + at, n) * load<FULL>(inverse + at, n);
          float* row = kept + (t * K + k) * 2 * W;
          store<true>(row, first[k]);
          store<true>(row + W, second[k]);
          first[k] = keep * first[k] + add * a;
          second[k] = keep * second[k] - add * (a * load<FULL>(y + at, n));
        }
      }
      for (int k = 0; k < K; k++) first[k] = second[k] = Vec{};
      for (int64_t t = tokens - 1; t >= 0; t--) {
        int64_t gap = gap_before(position, t, tokens);
        float place = (position ? position[t] : t) - centre;
        for (int k = 0; k < K; k++) {
          Vec keep, add;
          d.over(gap, k, keep, add);
          int64_t at = start + t * C + k * W, n = left - k * W;
          const float* row = kept + (t * K + k) * 2 * W;
          Vec g = load<FULL>(grad + at, n), a = g * load<FULL>(inverse + at, n);
          Vec mean = load<FULL>(y + at, n), v = load<FULL>(val + at, n), q = -a * mean;
          Vec e = vanishing(load<FULL>(key + at, n) - load<FULL>(top + sample * C + c + k * W, n));
          Vec before_a = load<true>(row), before_q = load<true>(row + W);
          Vec total_a = before_a + first[k] + u[k] * a, total_q = before_q + second[k] + u[k] * q;
          Vec change = before_q - second[k] + v * (before_a - first[k]);
          Vec own = (v - mean) * a * e;
          // d/dd of exp(-d (|p_t - p_s| - 1)), with p_t - p_s split into the two tokens' positions.
          Vec moment = change * e + 2.f * g * load<FULL>(slope + at, n) + own * u[k];
          dd[k] -= moment * place + u[k] * own;
          du[k] += own;
          store<FULL>(dval + at, e * total_a, n);
          store<FULL>(dkey + at, e * (total_q + v * total_a), n);
          first[k] = keep * first[k] + add * a;
          second[k] = keep * second[k] + add * q;
        }
      }
    }
    for (int k = 0; k < K; k++) {
      float* row = partial.data() + part * 2 * C + c + k * W;
      store<FULL>(row, dd[k], left - k * W);
      store<FULL>(row + C, du[k], left - k * W);
    }
  };
  parallel(parts.count * blocks(C), threads, [&](int64_t task) {
    int64_t c = task % blocks(C) * BLOCK, part = task / blocks(C);
    c + BLOCK <= C ? block(std::true_type{}, part, c) : block(std::false_type{}, part, c);
  });
  std::vector<float> total(2 * C);
  add_parts(partial.data(), parts.count, 2 * C, total.data());
  std::copy(total.begin(), total.begin() + C, ddecay);
  std::copy(total.begin() + C, total.end(), dbonus);
}

// ---------------------------------------------------------------- state space dual (Mamba-2)

// A tile of a head's state, STATES x 2 vectors, stays in registers while all tokens pass by.
constexpr int STATES = W == 16 ? 8 : 4;
constexpr int64_t SEGMENT = 32;

// One sample of packed (T, H P + 2 N): x is read where it lies, B and C once for all heads.
template <class T>
struct Sample {
  const T* packed;
  const float *dt, *log_decay;
  int64_t tokens, H, P, N, row;
  float *keys, *queries, *keep, *rest;  // (T, N), (T, N), (H, T)

  Sample(const T* all_packed, const float* all_dt, const float* all_decay, int64_t sample,
         int64_t tokens, int64_t H, int64_t P, int64_t N, int64_t more)
      : dt(all_dt + sample * tokens * H), log_decay(all_decay + sample * tokens * H),
        tokens(tokens), H(H), P(P), N(N), row(H * P + 2 * N) {
    packed = all_packed + sample * tokens * row;
    keys = scratch(tokens * (2 * N + H) + more);
    queries = keys + tokens * N;
    keep = queries + tokens * N;
    rest = keep + tokens * H;
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t n = 0; n < N; n++) {
        keys[t * N + n] = value(packed[t * row + H * P + n]);
        queries[t * N + n] = value(packed[t * row + H * P + N + n]);
      }
    for (int64_t h = 0; h < H; h++)
      for (int64_t t = 0; t < tokens; t++) keep[h * tokens + t] = log_decay[t * H + h];
    for (int64_t i = 0; i < H * tokens; i += W) {
      // A state that decays by e^-87 is gone.
      store<false>(keep + i, vanishing(load<false>(keep + i, H * tokens - i)), H * tokens - i);
    }
  }
  const T* x(int64_t t, int64_t h, int64_t p) const { return packed + t * row + h * P + p; }
};

// Walk the tiles of a head: body(first channel, channels) for each pair of vectors.
template <class Body>
inline void tiles(int64_t P, const Body& body) {
  for (int64_t p = 0; p < P; p += 2 * W)
    P - p >= 2 * W ? body(std::true_type{}, p, P - p) : body(std::false_type{}, p, P - p);
}

template <class T>
void ssd_forward(const T* packed, const float* dt, const float* log_decay, const float* D,
                 int64_t B, int64_t tokens, int64_t H, int64_t P, int64_t N, T* out, float* y,
                 int64_t threads) {
  parallel(B, threads, [&](int64_t sample) {
    Sample<T> s(packed, dt, log_decay, sample, tokens, H, P, N, 0);
    for (int64_t h = 0; h < H; h++)
      tiles(P, [&](auto full, int64_t p, int64_t left) {
        constexpr bool FULL = decltype(full)::value;
        float skip = D ? D[h] : 0.f;
        for (int64_t n = 0; n < N; n += STATES) {
          Vec state[STATES][2] = {};
          for (int64_t t = 0; t < tokens; t++) {
            float keep = s.keep[h * tokens + t], step = s.dt[t * H + h];
            const float *b = s.keys + t * N + n, *c = s.queries + t * N + n;
            float* row = y + ((sample * tokens + t) * H + h) * P + p;
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
              Vec x = load<FULL>(s.x(t, h, p) + k * W, left - k * W), write = x * step;
              Vec sum_a = n ? load<FULL>(row + k * W, left - k * W) : skip * x, sum_b{};
#pragma GCC unroll 8
              for (int i = 0; i < STATES; i++) {
                state[i][k] = keep * state[i][k] + b[i] * write;
                (i % 2 ? sum_a : sum_b) += c[i] * state[i][k];
              }
              sum_a += sum_b;
              store<FULL>(row + k * W, sum_a, left - k * W);
              if (sizeof(T) == 2 && n + STATES == N)
                store<FULL>(out + (row - y) + k * W, sum_a, left - k * W);
            }
          }
        }
      });
  });
}

// The state again, forward, for dC; its gradient, backward, for dB and dx. Every path from token s to
// token t carries exp(c_t - c_s), c the running sum of log decays: dL/dc_t = <dy_t, y_t> - <x_t, dx_t>.
// Rounding errors of these differences would add up over all tokens, so that the sum starts anew in
// every segment, from the gradient of the decay after its last token: exp(a) <state, its gradient>.
template <class T>
void ssd_backward(const T* grad, const T* packed, const float* dt, const float* log_decay,
                  const float* D, const float* y, int64_t B, int64_t tokens, int64_t H, int64_t P,
                  int64_t N, T* dpacked, float* ddt, float* dlog, float* dD, int64_t threads) {
  std::vector<float> partial(B * H);
  parallel(B, threads, [&](int64_t sample) {
    constexpr int64_t TILE = STATES * 2 * W, LANES = STATES * W;
    int64_t wide = (P + 2 * W - 1) / (2 * W) * 2 * W, of_head = wide / (2 * W) * TILE;
    int64_t of_heads = H * of_head, segments = (tokens + SEGMENT - 1) / SEGMENT;
    Sample<T> s(packed, dt, log_decay, sample, tokens, H, P, N,
                SEGMENT * LANES + (segments + 2) * of_heads + tokens * H * wide + segments * H);
    // The states before each segment and after the last, and the gradient of the state.
    float *lanes = s.rest, *states = lanes + SEGMENT * LANES;
    float *carried = states + (segments + 1) * of_heads, *dx = carried + of_heads;
    float* ends = dx + tokens * H * wide;  // (segments, H): gradients of the decays after them
    std::fill(ends, ends + segments * H, 0.f);
    const T* g_of = grad + sample * tokens * H * P;
    T* into = dpacked + sample * tokens * s.row;

    // Walk the heads' tiles over a segment of tokens, which stays in the cache: `step` has the state
    // and a token, and adds to the token's gradient of B or C, lane by lane over heads and tiles.
    auto segment = [&](int64_t first, int64_t n, int64_t column, bool forward, const auto& step) {
      int64_t count = std::min(SEGMENT, tokens - first), after = first + count;
      float* from = forward ? states + first / SEGMENT * of_heads : carried;
      float* to = forward ? from + of_heads : carried;
      std::fill(lanes, lanes + count * LANES, 0.f);
      for (int64_t h = 0; h < H; h++)
        tiles(P, [&](auto full, int64_t p, int64_t left) {
          Vec state[STATES][2];
          int64_t tile = h * of_head + p / (2 * W) * TILE;
          memcpy(state, from + tile, sizeof state);
          if (!forward && after < tokens) {
            const float* reached = states + (first / SEGMENT + 1) * of_heads + tile;
            Vec products[4] = {};
#pragma GCC unroll 16
            for (int i = 0; i < 2 * STATES; i++)
              products[i % 4] += state[i / 2][i % 2] * load<true>(reached + i * W);
            Vec product = (products[0] + products[1]) + (products[2] + products[3]);
            ends[first / SEGMENT * H + h] += s.keep[h * tokens + after] * sum(product);
          }
          for (int64_t i = 0; i < count; i++) {
            int64_t at = forward ? i : count - 1 - i;
            step(full, state, lanes + at * LANES, first + at, h, p, left);
          }
          memcpy(to + tile, state, sizeof state);
        });
      for (int64_t i = 0; i < count * STATES; i++) {
        T* target = into + (first + i / STATES) * s.row + H * P + column + n + i % STATES;
        store<false>(target, all(sum(load<true>(lanes + i * W))), 1);
      }
    };
    for (int64_t n = 0; n < N; n += STATES) {
      std::fill(states, states + of_heads, 0.f);
      for (int64_t first = 0; first < tokens; first += SEGMENT)
        segment(first, n, N, true, [&](auto full, Vec(*state)[2], float* lane, int64_t t, int64_t h, int64_t p, int64_t left) {
          constexpr bool FULL = decltype(full)::value;
          float keep = s.keep[h * tokens + t], step = s.dt[t * H + h];
          const float* b = s.keys + t * N + n;
          Vec write[2], g[2];
          for (int k = 0; k < 2; k++) {
            write[k] = load<FULL>(s.x(t, h, p) + k * W, left - k * W) * step;
            g[k] = load<FULL>(g_of + (t * H + h) * P + p + k * W, left - k * W);
          }
#pragma GCC unroll 8
          for (int i = 0; i < STATES; i++) {
            state[i][0] = keep * state[i][0] + b[i] * write[0];
            state[i][1] = keep * state[i][1] + b[i] * write[1];
            Vec sum = load<true>(lane + i * W) + g[0] * state[i][0] + g[1] * state[i][1];
            store<true>(lane + i * W, sum);
          }
        });
      std::fill(carried, carried + of_heads, 0.f);
      for (int64_t first = (tokens - 1) / SEGMENT * SEGMENT; first >= 0; first -= SEGMENT)
        segment(first, n, 0, false, [&](auto full, Vec(*state)[2], float* lane, int64_t t, int64_t h, int64_t p, int64_t left) {
          constexpr bool FULL = decltype(full)::value;
          float keep = t + 1 < tokens ? s.keep[h * tokens + t + 1] : 0.f, step = s.dt[t * H + h];
          const float *b = s.keys + t * N + n, *c = s.queries + t * N + n;
          float* dx_row = dx + (t * H + h) * wide + p;
          Vec write[2], g[2], back[2];
          for (int k = 0; k < 2; k++) {
            write[k] = load<FULL>(s.x(t, h, p) + k * W, left - k * W) * step;
            g[k] = load<FULL>(g_of + (t * H + h) * P + p + k * W, left - k * W);
            back[k] = n ? load<true>(dx_row + k * W) : Vec{};
          }
#pragma GCC unroll 8
          for (int i = 0; i < STATES; i++) {
            state[i][0] = keep * state[i][0] + c[i] * g[0];
            state[i][1] = keep * state[i][1] + c[i] * g[1];
            back[0] += b[i] * state[i][0];
            back[1] += b[i] * state[i][1];
            Vec sum = load<true>(lane + i * W) + write[0] * state[i][0] + write[1] * state[i][1];
            store<true>(lane + i * W, sum);
          }
          store<true>(dx_row, back[0]);
          store<true>(dx_row + W, back[1]);
        });
    }
    for (int64_t h = 0; h < H; h++) {
      float skip = D ? D[h] : 0.f, dskip = 0.f;
      double decayed = 0;
      for (int64_t t = tokens - 1; t >= 0; t--) {
        float step = s.dt[t * H + h];
        Vec through{}, at{}, direct{};
        for (int64_t p = 0; p < P; p += W) {
          int64_t place = ((sample * tokens + t) * H + h) * P + p, left = P - p;
          Vec x = load<false>(s.x(t, h, p), left), back = load<true>(dx + (t * H + h) * wide + p);
          Vec g = load<false>(grad + place, left);
          through += x * back;
          at += g * (load<false>(y + place, left) - skip * x);  // the skip does not decay
          direct += g * x;
          store<false>(into + t * s.row + h * P + p, back * step + skip * g, left);
        }
        float dstep = sum(through);
        if ((t + 1) % SEGMENT == 0) decayed = ends[t / SEGMENT * H + h];
        int64_t place = (sample * tokens + t) * H + h;
        decayed += sum(at) - dstep * step;
        ddt[place] = dstep;
        dlog[place] = float(decayed);
        dskip += sum(direct);
        if (t % SEGMENT == 0) {
          // At a segment's first token the value is known, so that what rounding has added up to
          // is too: its expected share is taken out of every sum.
          int64_t count = std::min(SEGMENT, tokens - t);
          float excess = float(decayed - (t ? ends[(t / SEGMENT - 1) * H + h] : 0.f)) / count;
          for (int64_t i = 0; i < count; i++) dlog[place + i * H] -= excess * (count - i);
        }
      }
      partial[sample * H + h] = dskip;
    }
  });
  if (D) add_parts(partial.data(), B, H, dD);
}

}  // namespace

// ---------------------------------------------------------------- the interface, for both types

// Pointers to the functions: their arguments are written down once, above.
#define EXPORT(name)                      \
  auto name##_float32 = &name<float>; \
  auto name##_bfloat16 = &name<bfloat16>;

extern "C" {
EXPORT(gelu_forward)
EXPORT(gelu_backward)
EXPORT(squared_relu_forward)
EXPORT(squared_relu_backward)
EXPORT(sigmoid_gate_forward)
EXPORT(sigmoid_gate_backward)
EXPORT(adaln_forward)
EXPORT(adaln_backward)
EXPORT(gated_sum_forward)
EXPORT(gated_sum_backward)
EXPORT(gated_rms_forward)
EXPORT(gated_rms_backward)
EXPORT(conv_forward)
EXPORT(conv_backward)
EXPORT(shift_mix_forward)
EXPORT(shift_mix_backward)
EXPORT(biwkv_forward)
EXPORT(biwkv_backward)
EXPORT(ssd_forward)
EXPORT(ssd_backward)
}
