/* What lies between the matrix products of a decoder layer, one pass over memory each, in float32; and, for a few rows, the
 * products too.
 *
 * Legend: L positions, d width, H query heads, K key heads, D head size, F MLP width, N tokens, V vocabulary.
 *
 * The plain twins are engines/plain.py (what these compute, in words of PyTorch) and engines/layouts.py. Rows are shared out
 * over OpenMP threads; a sum over rows is made of sums over fixed chunks, so results do not depend on the number of threads.
 * NaN and infinity must come out where they went in: the learner looks for them. So no -ffast-math.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

typedef int64_t i64;

#define MANY 16384 /* numbers below which a second thread costs more than it does */
#define CHUNK 32   /* rows of one partial sum */
#define INLINE static inline __attribute__((always_inline))

/* Call with the usual head sizes as constants: loops over a head then unroll, and a head stays in registers. */
#define BY_SIZE(call) \
    switch (D) { \
    case 16: call(16); break; \
    case 32: call(32); break; \
    case 64: call(64); break; \
    case 128: call(128); break; \
    default: call(D); \
    }

/* To [-87, 88], and NaN to NaN, by what this machine has one instruction for. */
#ifdef __ARM_NEON
INLINE float bounded(float x) { return fminf(fmaxf(x, -87.0f), 88.0f); } /* these leave NaN out */
INLINE float unless_nan(float x, float y) { return x == x ? y : x; }
#else
INLINE float bounded(float x) {
    x = x < -87.0f ? -87.0f : x; /* written so that NaN passes */
    return x > 88.0f ? 88.0f : x;
}
INLINE float unless_nan(float x, float y) { return y; }
#endif

/* e^x to 2 ulp for -87 < x < 88, in steps a compiler can vectorise, of which few wait for one another. */
INLINE float quick_exp(float given) {
    union { uint32_t i; float f; } near, two;
    float x = bounded(given);
    near.f = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: what is left of the sum is a whole number, in the last bits */
    float n = near.f - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float square = r * r;
    float high = 1.3981999507e-3f + 1.9875691500e-4f * r;
    float middle = 4.1665795894e-2f + 8.3334519073e-3f * r;
    float low = 5.0000001201e-1f + 1.6666665459e-1f * r;
    float p = (low + square * (middle + square * high)) * square + (r + 1.0f);
    two.i = (near.i << 23) + (127u << 23);
    return unless_nan(given, p * two.f);
}

#ifdef __AVX__
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE float across(lanes s) {
#ifdef __ARM_NEON
    return vaddvq_f32((float32x4_t)s);
#else
    float sum = 0;
    for (int j = 0; j < LANES; j++) sum += s[j];
    return sum;
#endif
}

INLINE float dot(const float *a, const float *b, i64 n) {
    lanes s = {0}, t = {0};
    i64 j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        s += *(const lanes *)(a + j) * *(const lanes *)(b + j);
        t += *(const lanes *)(a + j + LANES) * *(const lanes *)(b + j + LANES);
    }
    float sum = across(s + t);
    for (; j < n; j++) sum += a[j] * b[j];
    return sum;
}

INLINE void axpy(float *restrict y, float a, const float *restrict x, i64 n) {
    i64 j = 0;
    for (; j + LANES <= n; j += LANES) *(lanes *)(y + j) += a * *(const lanes *)(x + j);
    for (; j < n; j++) y[j] += a * x[j];
}

/* total = x + delta (where there is one), h = weight * total / rms(total). */
void add_norm(const float *x, const float *delta, const float *weight, float eps, float *total, float *h, i64 L, i64 d) {
#pragma omp parallel for schedule(static) if (L * d > MANY)
    for (i64 i = 0; i < L; i++) {
        const float *a = x + i * d, *t = a;
        float s = 0;
        if (delta) {
            const float *b = delta + i * d;
            float *o = total + i * d;
#pragma omp simd
            for (i64 j = 0; j < d; j++) o[j] = a[j] + b[j];
            t = o;
        }
        s = dot(t, t, d);
        float scale = 1.0f / sqrtf(s / (float)d + eps), *out = h + i * d;
#pragma omp simd
        for (i64 j = 0; j < d; j++) out[j] = t[j] * scale * weight[j];
    }
}

/* dh -> d(total) + beside, the norm's output again, and partial sums [ceil(L / CHUNK), d] of d(weight). */
void norm_backward(const float *dh, const float *total, const float *weight, float eps, const float *beside, float *dx,
                   float *h, float *partial, i64 L, i64 d) {
#pragma omp parallel for schedule(static) if (L * d > MANY)
    for (i64 c = 0; c < (L + CHUNK - 1) / CHUNK; c++) {
        float *sum = partial + c * d;
        memset(sum, 0, d * sizeof(float));
        for (i64 i = c * CHUNK; i < L && i < (c + 1) * CHUNK; i++) {
            const float *t = total + i * d, *g = dh + i * d;
            float scale = 1.0f / sqrtf(dot(t, t, d) / (float)d + eps), down = 0;
#pragma omp simd reduction(+ : down)
            for (i64 j = 0; j < d; j++) down += g[j] * weight[j] * t[j];
            down *= scale * scale / (float)d;
            float *out = dx + i * d, *again = h + i * d;
#pragma omp simd
            for (i64 j = 0; j < d; j++) {
                float unit = t[j] * scale;
                sum[j] += g[j] * unit;
                again[j] = unit * weight[j];
                out[j] = scale * g[j] * weight[j] - t[j] * scale * down;
            }
            if (beside) axpy(out, 1.0f, beside + i * d, d);
        }
    }
}

/* Turn the first ``heads`` heads of rows of ``stride`` numbers in place by angles [L, D/2]; sign -1 turns back. */
void rotate(float *rows, const float *cos, const float *sin, float sign, i64 L, i64 heads, i64 D, i64 stride) {
    i64 half = D / 2;
#pragma omp parallel for schedule(static) if (L * heads * D > MANY)
    for (i64 i = 0; i < L; i++)
        for (i64 n = 0; n < heads; n++) {
            float *a = rows + i * stride + n * D, *b = a + half;
            const float *c = cos + i * half, *s = sin + i * half;
#pragma omp simd
            for (i64 j = 0; j < half; j++) {
                float x = a[j], y = b[j], t = sign * s[j];
                a[j] = x * c[j] - y * t;
                b[j] = y * c[j] + x * t;
            }
        }
}

/* both [L, 2F] -> silu(first half) * second half. */
void swiglu(const float *both, float *out, i64 L, i64 F) {
#pragma omp parallel for schedule(static) if (L * F > MANY)
    for (i64 i = 0; i < L; i++) {
        const float *g = both + i * 2 * F, *u = g + F;
        float *o = out + i * F;
#pragma omp simd
        for (i64 j = 0; j < F; j++) o[j] = g[j] / (1.0f + quick_exp(-g[j])) * u[j];
    }
}

void swiglu_backward(const float *both, const float *d, float *d_both, float *act, i64 L, i64 F) {
#pragma omp parallel for schedule(static) if (L * F > MANY)
    for (i64 i = 0; i < L; i++) {
        const float *g = both + i * 2 * F, *u = g + F, *p = d + i * F;
        float *dg = d_both + i * 2 * F, *du = dg + F, *o = act + i * F;
#pragma omp simd
        for (i64 j = 0; j < F; j++) {
            float s = 1.0f / (1.0f + quick_exp(-g[j])), silu = g[j] * s;
            dg[j] = p[j] * u[j] * (s + silu * (1.0f - s));
            du[j] = p[j] * silu;
            o[j] = silu * u[j];
        }
    }
}

/* logits [N, V], z = logits * inverse -> log p of the targets, lse(z) and, where asked for, the entropy and p - onehot [N, V]. */
void scores(const float *logits, const i64 *targets, const float *inverse, float *logp, float *lse, float *entropy,
            float *keep, i64 N, i64 V) {
#pragma omp parallel for schedule(static) if (N * V > MANY)
    for (i64 i = 0; i < N; i++) {
        const float *z = logits + i * V;
        float t = inverse[i], top = z[0], sum = 0, mean = 0;
#pragma omp simd reduction(max : top)
        for (i64 j = 0; j < V; j++) top = top < z[j] ? z[j] : top;
#pragma omp simd reduction(+ : sum, mean)
        for (i64 j = 0; j < V; j++) {
            float a = (z[j] - top) * t, e = quick_exp(a);
            sum += e;
            mean += e * a;
        }
        float log_sum = logf(sum);
        lse[i] = top * t + log_sum;
        logp[i] = (z[targets[i]] - top) * t - log_sum;
        if (entropy) entropy[i] = log_sum - mean / sum;
        if (keep) {
            float *p = keep + i * V, part = 1.0f / sum;
#pragma omp simd
            for (i64 j = 0; j < V; j++) p[j] = quick_exp((z[j] - top) * t) * part;
            p[targets[i]] -= 1.0f;
        }
    }
}

/* logits -> d(logits), in place: (g (onehot - p) - g' p (log p + H)) / temperature. */
void pull(float *logits, const i64 *targets, const float *inverse, const float *lse, const float *g_logp,
          const float *g_entropy, const float *entropy, i64 N, i64 V) {
#pragma omp parallel for schedule(static) if (N * V > MANY)
    for (i64 i = 0; i < N; i++) {
        float *z = logits + i * V, t = inverse[i], g = g_logp ? g_logp[i] : 0, ge = g_entropy ? g_entropy[i] : 0;
        float base = lse[i], high = g_entropy ? entropy[i] : 0;
#pragma omp simd
        for (i64 j = 0; j < V; j++) {
            float log_p = z[j] * t - base, p = quick_exp(log_p);
            z[j] = -t * p * (g + ge * (log_p + high));
        }
        z[targets[i]] += t * g;
    }
}

/* ------------------------------------------------------------------ attention */

/* A head held in registers: D is a multiple of LANES. */
#define HEAD(x) const lanes *x##_at = (const lanes *)(x); lanes x##_in[D / LANES]; \
    for (i64 c = 0; c < D / LANES; c++) x##_in[c] = x##_at[c];

INLINE float meet(const lanes *a, const float *b, i64 D) {
    const lanes *at = (const lanes *)b;
    lanes s = a[0] * at[0];
    for (i64 c = 1; c < D / LANES; c++) s += a[c] * at[c];
    return across(s);
}

INLINE void add(float *to, float factor, const lanes *a, i64 D) {
    for (i64 c = 0; c < D / LANES; c++) ((lanes *)to)[c] += factor * a[c];
}

/* One query to n keys that lie ``step`` numbers apart, or at rows[j] * step: weights e^(s - top) in p, their sum, the top. */
INLINE float weigh(const float *q, const float *k, const i64 *rows, i64 step, i64 n, i64 D, float scale, float *p,
                   float *sum) {
    float top = -INFINITY, all = 0;
    HEAD(q)
    for (i64 j = 0; j < n; j++) p[j] = scale * meet(q_in, k + (rows ? rows[j] : j) * step, D);
#pragma omp simd reduction(max : top)
    for (i64 j = 0; j < n; j++) top = top < p[j] ? p[j] : top;
#pragma omp simd reduction(+ : all)
    for (i64 j = 0; j < n; j++) {
        p[j] = quick_exp(p[j] - top);
        all += p[j];
    }
    *sum = all;
    return top;
}

/* out = factor * sum of p[j] * value j. */
INLINE void mix(float *out, const float *p, const float *v, const i64 *rows, i64 step, i64 n, i64 D, float factor) {
    lanes sum[D / LANES];
    for (i64 c = 0; c < D / LANES; c++) sum[c] = (lanes){0};
    for (i64 j = 0; j < n; j++) {
        const lanes *at = (const lanes *)(v + (rows ? rows[j] : j) * step);
        for (i64 c = 0; c < D / LANES; c++) sum[c] += p[j] * at[c];
    }
    for (i64 c = 0; c < D / LANES; c++) ((lanes *)out)[c] = factor * sum[c];
}

/* Packed sequences, each causal in itself. Position i of L has the state of row[i]; where owned[i], it asks for it.
 * q, k, v: rows of ``stride`` numbers. out [U, H, D], lse [U, H]. */
INLINE void attend_one(const float *q, const float *k, const float *v, const i64 *rows, i64 mine, i64 n, float *out,
                       float *lse, float *p, i64 H, i64 K, i64 D, i64 stride, float scale) {
    for (i64 h = 0; h < H; h++) {
        i64 at = h / (H / K) * D;
        float sum, top = weigh(q + mine * stride + h * D, k + at, rows, stride, n, D, scale, p, &sum);
        mix(out + (mine * H + h) * D, p, v + at, rows, stride, n, D, 1.0f / sum);
        lse[mine * H + h] = top + logf(sum);
    }
}

void attend(const float *q, const float *k, const float *v, const i64 *row, const i64 *start, const uint8_t *owned,
            float *out, float *lse, i64 S, i64 longest, i64 H, i64 K, i64 D, i64 stride, float scale) {
#pragma omp parallel
    {
        float *p = malloc(longest * sizeof(float));
#pragma omp for schedule(dynamic, 4)
        for (i64 s = 0; s < S; s++)
            for (i64 i = start[s]; i < start[s + 1]; i++) {
                if (!owned[i]) continue;
#define ONE(size) attend_one(q, k, v, row + start[s], row[i], i - start[s] + 1, out, lse, p, H, K, size, stride, scale)
                BY_SIZE(ONE)
#undef ONE
            }
        free(p);
    }
}

/* One sequence and one of its key heads. ``near``: room for 4 n heads and 2 n numbers; keys, values and their gradients are
 * brought together there, since their rows lie apart. */
INLINE void pull_one(const float *q, const float *k, const float *v, const i64 *rows, const uint8_t *owned, i64 n,
                     const float *out, const float *lse, const float *d_out, float *dq, float *dk, float *dv, float *near,
                     i64 H, i64 K, i64 kv, i64 D, i64 stride, i64 given, float scale) {
    float *keys = near, *values = keys + n * D, *d_keys = values + n * D, *d_values = d_keys + n * D;
    float *p = d_values + n * D, *slope = p + n;
    for (i64 j = 0; j < n; j++) {
        memcpy(keys + j * D, k + rows[j] * given + kv * D, D * sizeof(float));
        memcpy(values + j * D, v + rows[j] * given + kv * D, D * sizeof(float));
    }
    memset(d_keys, 0, 2 * n * D * sizeof(float));
    for (i64 i = 0; i < n; i++) {
        if (!owned[i]) continue;
        for (i64 h = kv * (H / K); h < (kv + 1) * (H / K); h++) {
            i64 own = rows[i] * H + h;
            const float *ask = q + rows[i] * given + h * D, *g = d_out + own * D;
            HEAD(ask)
            HEAD(g)
            float base = lse[own], mean = meet(g_in, out + own * D, D);
            for (i64 j = 0; j <= i; j++) {
                p[j] = scale * meet(ask_in, keys + j * D, D);
                slope[j] = meet(g_in, values + j * D, D);
            }
#pragma omp simd
            for (i64 j = 0; j <= i; j++) {
                p[j] = quick_exp(p[j] - base);
                slope[j] = p[j] * (slope[j] - mean) * scale;
            }
            mix(dq + rows[i] * stride + h * D, slope, keys, NULL, D, i + 1, D, 1.0f);
            for (i64 j = 0; j <= i; j++) add(d_keys + j * D, slope[j], ask_in, D);
            for (i64 j = 0; j <= i; j++) add(d_values + j * D, p[j], g_in, D);
        }
    }
    for (i64 j = 0; j < n; j++) {
        axpy(dk + rows[j] * stride + kv * D, 1.0f, d_keys + j * D, D);
        axpy(dv + rows[j] * stride + kv * D, 1.0f, d_values + j * D, D);
    }
}

/* Gradients into dq, dk, dv: rows of ``stride`` numbers, dk and dv zero at first; q, k, v: of ``given``. Rows may belong to
 * several sequences, a key head to one thread only. */
void attend_backward(const float *q, const float *k, const float *v, const i64 *row, const i64 *start,
                     const uint8_t *owned, const float *out, const float *lse, const float *d_out, float *dq, float *dk,
                     float *dv, i64 S, i64 longest, i64 H, i64 K, i64 D, i64 stride, i64 given, float scale) {
#pragma omp parallel for schedule(static)
    for (i64 kv = 0; kv < K; kv++) {
        float *near = malloc(longest * (4 * D + 2) * sizeof(float));
        for (i64 s = 0; s < S; s++) {
            i64 a = start[s], n = start[s + 1] - a;
#define ONE(size) \
    pull_one(q, k, v, row + a, owned + a, n, out, lse, d_out, dq, dk, dv, near, H, K, kv, size, stride, given, scale)
            BY_SIZE(ONE)
#undef ONE
        }
        free(near);
    }
}

/* Tokens to their columns: turn the queries and keys of qkv [n, (H + 2K) D] in place, and copy keys and values to
 * slots [rows, K, width, D]. cos and sin [context, D/2]. */
void seat(float *qkv, const float *cos, const float *sin, const i64 *row, const i64 *position, float *keys, float *values,
          i64 n, i64 H, i64 K, i64 D, i64 width) {
    i64 stride = (H + 2 * K) * D, half = D / 2;
#pragma omp parallel for schedule(static) if (n * stride > MANY)
    for (i64 t = 0; t < n; t++) {
        float *own = qkv + t * stride;
        const float *c = cos + position[t] * half, *s = sin + position[t] * half;
        for (i64 h = 0; h < H + K; h++) {
            float *a = own + h * D, *b = a + half;
#pragma omp simd
            for (i64 j = 0; j < half; j++) {
                float x = a[j], y = b[j];
                a[j] = x * c[j] - y * s[j];
                b[j] = y * c[j] + x * s[j];
            }
        }
        for (i64 h = 0; h < K; h++) {
            i64 to = ((row[t] * K + h) * width + position[t]) * D;
            memcpy(keys + to, own + (H + h) * D, D * sizeof(float));
            memcpy(values + to, own + (H + K + h) * D, D * sizeof(float));
        }
    }
}

INLINE void look_one(const float *q, const float *keys, const float *values, i64 row, i64 size, float *out, float *p, i64 H,
                     i64 K, i64 D, i64 width, float scale) {
    for (i64 h = 0; h < H; h++) {
        i64 at = (row * K + h / (H / K)) * width * D;
        float sum;
        weigh(q + h * D, keys + at, NULL, D, size, D, scale, p, &sum);
        mix(out + h * D, p, values + at, NULL, D, size, D, 1.0f / sum);
    }
}

/* Each token to all columns of its row up to its own: out [n, H, D]. */
void look(const float *qkv, const i64 *row, const i64 *position, const float *keys, const float *values, float *out, i64 n,
          i64 longest, i64 H, i64 K, i64 D, i64 width, float scale) {
    i64 stride = (H + 2 * K) * D;
#pragma omp parallel if (n * H * D * longest > MANY)
    {
        float *p = malloc(longest * sizeof(float));
#pragma omp for schedule(dynamic, 4)
        for (i64 t = 0; t < n; t++) {
#define ONE(size) \
    look_one(qkv + t * stride, keys, values, row[t], position[t] + 1, out + t * H * size, p, H, K, size, width, scale)
            BY_SIZE(ONE)
#undef ONE
        }
        free(p);
    }
}

/* ------------------------------------------------------------------ few rows through all layers */

#define WIDE 16 /* columns of a panel of weights */
#define VECTORS (WIDE / LANES)
#define TALL 6 /* rows of a tile: it stays in registers */

/* Some rows of a [.., n] times a panel [n, WIDE], plus ``add`` where there is one. */
INLINE void tile(const float *a, i64 n, const float *panel, const float *add, i64 apart, float *out, i64 stride, int rows) {
    lanes s[TALL][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VECTORS; v++) s[i][v] = add ? *(const lanes *)(add + i * apart + v * LANES) : (lanes){0};
    for (i64 k = 0; k < n; k++) {
        lanes w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = *(const lanes *)(panel + k * WIDE + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < VECTORS; v++) s[i][v] += a[i * n + k] * w[v];
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VECTORS; v++) *(lanes *)(out + i * stride + v * LANES) = s[i][v];
}

/* out [L, N] = a [L, n] times panels [N / WIDE, n, WIDE], plus ``add``: rows ``apart`` from each other (0: one for all), which
 * may be out itself. What becomes of a row does not depend on the others. */
void product(const float *a, const float *panels, const float *add, i64 apart, float *out, i64 L, i64 n, i64 N) {
#pragma omp parallel for schedule(static) if (L * n * N > MANY)
    for (i64 p = 0; p < N / WIDE; p++) {
        const float *panel = panels + p * n * WIDE;
#define ROWS(count) \
    tile(a + i * n, n, panel, add ? add + i * apart + p * WIDE : NULL, apart, out + i * N + p * WIDE, N, count)
        i64 i = 0;
        for (; i + TALL <= L; i += TALL) ROWS(TALL);
        switch (L - i) {
        case 1: ROWS(1); break;
        case 2: ROWS(2); break;
        case 3: ROWS(3); break;
        case 4: ROWS(4); break;
        case 5: ROWS(5); break;
        }
#undef ROWS
    }
}

typedef struct {
    const float *norm, *qkv, *qkv_bias, *out, *out_bias, *mlp_norm, *gate_up, *down;
} layer;

/* Tokens x [L, d] of any rows of slots through all layers, in place; each sees the columns of its row up to its own. Unless the
 * ``last`` layer's output is wanted, only its keys and values are computed. ``room`` holds
 * L * (d + (H + 2K) D + H D + 3 F) numbers. */
void through(float *x, const layer *layers, float *const *keys, float *const *values, const float *cos, const float *sin,
             const i64 *row, const i64 *position, float *room, i64 L, i64 count, i64 last, i64 d, i64 F, i64 H, i64 K, i64 D,
             i64 width, i64 longest, float scale, float eps) {
    i64 wide = (H + 2 * K) * D;
    float *h = room, *qkv = h + L * d, *mixed = qkv + L * wide, *both = mixed + L * H * D, *act = both + L * 2 * F;
    for (i64 i = 0; i < count; i++) {
        const layer *w = layers + i;
        add_norm(x, NULL, w->norm, eps, NULL, h, L, d);
        product(h, w->qkv, w->qkv_bias, 0, qkv, L, d, wide);
        seat(qkv, cos, sin, row, position, keys[i], values[i], L, H, K, D, width);
        if (i == count - 1 && !last) return;
        look(qkv, row, position, keys[i], values[i], mixed, L, longest, H, K, D, width, scale);
        product(mixed, w->out, x, d, x, L, H * D, d);
        for (i64 t = 0; w->out_bias && t < L; t++) axpy(x + t * d, 1.0f, w->out_bias, d);
        add_norm(x, NULL, w->mlp_norm, eps, NULL, h, L, d);
        product(h, w->gate_up, NULL, 0, both, L, d, 2 * F);
        swiglu(both, act, L, F);
        product(act, w->down, x, d, x, L, F, d);
    }
}
