/* The operations between the matrix products of a decoder layer, one pass over memory each, in float32; and, for small batches,
 * the matrix products too.
 *
 * Legend: L positions, d width, H query heads, K key heads, D head size, F MLP width, N tokens, V vocabulary.
 *
 * reference.py and generator/attention_layouts.py compute the same in PyTorch. Rows are distributed over OpenMP
 * threads; a sum over rows adds sums over fixed chunks, so results do not depend on the number of threads. NaN and infinity must
 * propagate, because the learner checks for them: so no -ffast-math.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

typedef int64_t i64;

#define MIN_PARALLEL 16384 /* below this many numbers a second thread costs more than it saves */
#define CHUNK 32   /* rows of one partial sum */
#define INLINE static inline __attribute__((always_inline))

/* Call with the common head sizes as constants: loops over a head then unroll, and a head stays in registers. */
#define BY_HEAD_SIZE(call) \
    switch (D) { \
    case 16: call(16); break; \
    case 32: call(32); break; \
    case 64: call(64); break; \
    case 128: call(128); break; \
    default: call(D); \
    }

/* Clamp to [-87, 88] and keep NaN, each with an operation that is one instruction on this machine. */
#ifdef __ARM_NEON
INLINE float clamped(float x) { return fminf(fmaxf(x, -87.0f), 88.0f); } /* these drop NaN */
INLINE float propagate_nan(float x, float y) { return x == x ? y : x; }
#else
INLINE float clamped(float x) {
    x = x < -87.0f ? -87.0f : x; /* in this order NaN passes */
    return x > 88.0f ? 88.0f : x;
}
INLINE float propagate_nan(float x, float y) { return y; }
#endif

/* e^x to 2 ulp for -87 < x < 88, in operations that a compiler can vectorise, with short dependency chains. */
INLINE float fast_exp(float x_in) {
    union { uint32_t i; float f; } rounded, power;
    float x = clamped(x_in);
    rounded.f = x * 1.44269504f + 12582912.0f; /* + 1.5 * 2^23 rounds to an integer, in the low bits */
    float n = rounded.f - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float square = r * r;
    float high = 1.3981999507e-3f + 1.9875691500e-4f * r;
    float middle = 4.1665795894e-2f + 8.3334519073e-3f * r;
    float low = 5.0000001201e-1f + 1.6666665459e-1f * r;
    float p = (low + square * (middle + square * high)) * square + (r + 1.0f);
    power.i = (rounded.i << 23) + (127u << 23);
    return propagate_nan(x_in, p * power.f);
}

#ifdef __AVX__
#define VECTOR 8
#else
#define VECTOR 4
#endif
typedef float vec __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));

INLINE float horizontal_sum(vec s) {
#ifdef __ARM_NEON
    return vaddvq_f32((float32x4_t)s);
#else
    float sum = 0;
    for (int j = 0; j < VECTOR; j++) sum += s[j];
    return sum;
#endif
}

INLINE float dot(const float *a, const float *b, i64 n) {
    vec s = {0}, t = {0};
    i64 j = 0;
    for (; j + 2 * VECTOR <= n; j += 2 * VECTOR) {
        s += *(const vec *)(a + j) * *(const vec *)(b + j);
        t += *(const vec *)(a + j + VECTOR) * *(const vec *)(b + j + VECTOR);
    }
    float sum = horizontal_sum(s + t);
    for (; j < n; j++) sum += a[j] * b[j];
    return sum;
}

INLINE void axpy(float *restrict y, float a, const float *restrict x, i64 n) {
    i64 j = 0;
    for (; j + VECTOR <= n; j += VECTOR) *(vec *)(y + j) += a * *(const vec *)(x + j);
    for (; j < n; j++) y[j] += a * x[j];
}

/* total = x + delta (unless NULL), h = weight * total / rms(total). */
void add_norm(const float *x, const float *delta, const float *weight, float eps, float *total, float *h, i64 L, i64 d) {
#pragma omp parallel for schedule(static) if (L * d > MIN_PARALLEL)
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

/* dh -> d(total) + residual_grad, the norm's output recomputed, and partial sums [ceil(L / CHUNK), d] of d(weight). */
void norm_backward(const float *dh, const float *total, const float *weight, float eps, const float *residual_grad,
                   float *dx, float *h, float *partial, i64 L, i64 d) {
#pragma omp parallel for schedule(static) if (L * d > MIN_PARALLEL)
    for (i64 c = 0; c < (L + CHUNK - 1) / CHUNK; c++) {
        float *sum = partial + c * d;
        memset(sum, 0, d * sizeof(float));
        for (i64 i = c * CHUNK; i < L && i < (c + 1) * CHUNK; i++) {
            const float *t = total + i * d, *g = dh + i * d;
            float scale = 1.0f / sqrtf(dot(t, t, d) / (float)d + eps), projection = 0;
#pragma omp simd reduction(+ : projection)
            for (i64 j = 0; j < d; j++) projection += g[j] * weight[j] * t[j];
            projection *= scale * scale / (float)d;
            float *out = dx + i * d, *normed = h + i * d;
#pragma omp simd
            for (i64 j = 0; j < d; j++) {
                float unit = t[j] * scale;
                sum[j] += g[j] * unit;
                normed[j] = unit * weight[j];
                out[j] = scale * g[j] * weight[j] - t[j] * scale * projection;
            }
            if (residual_grad) axpy(out, 1.0f, residual_grad + i * d, d);
        }
    }
}

/* Rotate the first ``heads`` heads of rows with ``stride`` in place by angles [L, D/2]; sign -1 rotates back. */
void rotate(float *rows, const float *cos, const float *sin, float sign, i64 L, i64 heads, i64 D, i64 stride) {
    i64 half = D / 2;
#pragma omp parallel for schedule(static) if (L * heads * D > MIN_PARALLEL)
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

/* gate_up [L, 2F] -> silu(first half) * second half. */
void swiglu(const float *gate_up, float *out, i64 L, i64 F) {
#pragma omp parallel for schedule(static) if (L * F > MIN_PARALLEL)
    for (i64 i = 0; i < L; i++) {
        const float *g = gate_up + i * 2 * F, *u = g + F;
        float *o = out + i * F;
#pragma omp simd
        for (i64 j = 0; j < F; j++) o[j] = g[j] / (1.0f + fast_exp(-g[j])) * u[j];
    }
}

void swiglu_backward(const float *gate_up, const float *d, float *d_gate_up, float *act, i64 L, i64 F) {
#pragma omp parallel for schedule(static) if (L * F > MIN_PARALLEL)
    for (i64 i = 0; i < L; i++) {
        const float *g = gate_up + i * 2 * F, *u = g + F, *p = d + i * F;
        float *dg = d_gate_up + i * 2 * F, *du = dg + F, *o = act + i * F;
#pragma omp simd
        for (i64 j = 0; j < F; j++) {
            float s = 1.0f / (1.0f + fast_exp(-g[j])), silu = g[j] * s;
            dg[j] = p[j] * u[j] * (s + silu * (1.0f - s));
            du[j] = p[j] * silu;
            o[j] = silu * u[j];
        }
    }
}

/* logits [N, V], z = logits * inverse -> log p of the targets, lse(z) and, unless NULL, the entropy and the residual
 * p - onehot [N, V]. */
void log_probs(const float *logits, const i64 *targets, const float *inverse, float *logp, float *lse, float *entropy,
               float *residual, i64 N, i64 V) {
#pragma omp parallel for schedule(static) if (N * V > MIN_PARALLEL)
    for (i64 i = 0; i < N; i++) {
        const float *z = logits + i * V;
        float t = inverse[i], top = z[0], sum = 0, mean = 0;
#pragma omp simd reduction(max : top)
        for (i64 j = 0; j < V; j++) top = top < z[j] ? z[j] : top;
#pragma omp simd reduction(+ : sum, mean)
        for (i64 j = 0; j < V; j++) {
            float a = (z[j] - top) * t, e = fast_exp(a);
            sum += e;
            mean += e * a;
        }
        float log_sum = logf(sum);
        lse[i] = top * t + log_sum;
        logp[i] = (z[targets[i]] - top) * t - log_sum;
        if (entropy) entropy[i] = log_sum - mean / sum;
        if (residual) {
            float *p = residual + i * V, part = 1.0f / sum;
#pragma omp simd
            for (i64 j = 0; j < V; j++) p[j] = fast_exp((z[j] - top) * t) * part;
            p[targets[i]] -= 1.0f;
        }
    }
}

/* logits -> d(logits), in place: (g (onehot - p) - g' p (log p + H)) / temperature. */
void log_probs_backward(float *logits, const i64 *targets, const float *inverse, const float *lse, const float *g_logp,
                        const float *g_entropy, const float *entropy, i64 N, i64 V) {
#pragma omp parallel for schedule(static) if (N * V > MIN_PARALLEL)
    for (i64 i = 0; i < N; i++) {
        float *z = logits + i * V, t = inverse[i], g = g_logp ? g_logp[i] : 0, ge = g_entropy ? g_entropy[i] : 0;
        float base = lse[i], high = g_entropy ? entropy[i] : 0;
#pragma omp simd
        for (i64 j = 0; j < V; j++) {
            float log_p = z[j] * t - base, p = fast_exp(log_p);
            z[j] = -t * p * (g + ge * (log_p + high));
        }
        z[targets[i]] += t * g;
    }
}

/* ------------------------------------------------------------------ attention */

/* Load a head into registers: D is a multiple of VECTOR. */
#define HEAD(x) const vec *x##_at = (const vec *)(x); vec x##_in[D / VECTOR]; \
    for (i64 c = 0; c < D / VECTOR; c++) x##_in[c] = x##_at[c];

INLINE float vec_dot(const vec *a, const float *b, i64 D) {
    const vec *at = (const vec *)b;
    vec s = a[0] * at[0];
    for (i64 c = 1; c < D / VECTOR; c++) s += a[c] * at[c];
    return horizontal_sum(s);
}

INLINE void add(float *to, float factor, const vec *a, i64 D) {
    for (i64 c = 0; c < D / VECTOR; c++) ((vec *)to)[c] += factor * a[c];
}

/* One query over n keys at j * step, or at rows[j] * step: weights e^(s - top) in p, their sum; returns the top score. */
INLINE float softmax_weights(const float *q, const float *k, const i64 *rows, i64 step, i64 n, i64 D, float scale, float *p,
                             float *sum) {
    float top = -INFINITY, all = 0;
    HEAD(q)
    for (i64 j = 0; j < n; j++) p[j] = scale * vec_dot(q_in, k + (rows ? rows[j] : j) * step, D);
#pragma omp simd reduction(max : top)
    for (i64 j = 0; j < n; j++) top = top < p[j] ? p[j] : top;
#pragma omp simd reduction(+ : all)
    for (i64 j = 0; j < n; j++) {
        p[j] = fast_exp(p[j] - top);
        all += p[j];
    }
    *sum = all;
    return top;
}

/* out = factor * sum of p[j] * value j. */
INLINE void weighted_sum(float *out, const float *p, const float *v, const i64 *rows, i64 step, i64 n, i64 D,
                         float factor) {
    vec sum[D / VECTOR];
    for (i64 c = 0; c < D / VECTOR; c++) sum[c] = (vec){0};
    for (i64 j = 0; j < n; j++) {
        const vec *at = (const vec *)(v + (rows ? rows[j] : j) * step);
        for (i64 c = 0; c < D / VECTOR; c++) sum[c] += p[j] * at[c];
    }
    for (i64 c = 0; c < D / VECTOR; c++) ((vec *)out)[c] = factor * sum[c];
}

/* Causal attention of packed sequences. Position i of L has the state of row[i]; its output is computed where computed[i].
 * q, k, v: rows with ``stride``. out [U, H, D], lse [U, H]. */
INLINE void varlen_attention_query(const float *q, const float *k, const float *v, const i64 *rows, i64 query_row, i64 n,
                                   float *out, float *lse, float *p, i64 H, i64 K, i64 D, i64 stride, float scale) {
    for (i64 h = 0; h < H; h++) {
        i64 at = h / (H / K) * D;
        float sum, top = softmax_weights(q + query_row * stride + h * D, k + at, rows, stride, n, D, scale, p, &sum);
        weighted_sum(out + (query_row * H + h) * D, p, v + at, rows, stride, n, D, 1.0f / sum);
        lse[query_row * H + h] = top + logf(sum);
    }
}

void varlen_attention(const float *q, const float *k, const float *v, const i64 *row, const i64 *start,
                      const uint8_t *computed, float *out, float *lse, i64 S, i64 longest, i64 H, i64 K, i64 D, i64 stride,
                      float scale) {
#pragma omp parallel
    {
        float *p = malloc(longest * sizeof(float));
#pragma omp for schedule(dynamic, 4)
        for (i64 s = 0; s < S; s++)
            for (i64 i = start[s]; i < start[s + 1]; i++) {
                if (!computed[i]) continue;
#define ONE(size) \
    varlen_attention_query(q, k, v, row + start[s], row[i], i - start[s] + 1, out, lse, p, H, K, size, stride, scale)
                BY_HEAD_SIZE(ONE)
#undef ONE
            }
        free(p);
    }
}

/* One sequence and one of its key heads. ``scratch``: room for 4 n heads and 2 n numbers. Keys, values and their gradients are
 * gathered there, because their rows are not adjacent. */
INLINE void backward_key_head(const float *q, const float *k, const float *v, const i64 *rows, const uint8_t *computed,
                              i64 n, const float *out, const float *lse, const float *d_out, float *dq, float *dk,
                              float *dv, float *scratch, i64 H, i64 K, i64 kv, i64 D, i64 stride, i64 in_stride,
                              float scale) {
    float *keys = scratch, *values = keys + n * D, *d_keys = values + n * D, *d_values = d_keys + n * D;
    float *p = d_values + n * D, *slope = p + n;
    for (i64 j = 0; j < n; j++) {
        memcpy(keys + j * D, k + rows[j] * in_stride + kv * D, D * sizeof(float));
        memcpy(values + j * D, v + rows[j] * in_stride + kv * D, D * sizeof(float));
    }
    memset(d_keys, 0, 2 * n * D * sizeof(float));
    for (i64 i = 0; i < n; i++) {
        if (!computed[i]) continue;
        for (i64 h = kv * (H / K); h < (kv + 1) * (H / K); h++) {
            i64 head = rows[i] * H + h;
            const float *query = q + rows[i] * in_stride + h * D, *g = d_out + head * D;
            HEAD(query)
            HEAD(g)
            float base = lse[head], mean = vec_dot(g_in, out + head * D, D);
            for (i64 j = 0; j <= i; j++) {
                p[j] = scale * vec_dot(query_in, keys + j * D, D);
                slope[j] = vec_dot(g_in, values + j * D, D);
            }
#pragma omp simd
            for (i64 j = 0; j <= i; j++) {
                p[j] = fast_exp(p[j] - base);
                slope[j] = p[j] * (slope[j] - mean) * scale;
            }
            weighted_sum(dq + rows[i] * stride + h * D, slope, keys, NULL, D, i + 1, D, 1.0f);
            for (i64 j = 0; j <= i; j++) add(d_keys + j * D, slope[j], query_in, D);
            for (i64 j = 0; j <= i; j++) add(d_values + j * D, p[j], g_in, D);
        }
    }
    for (i64 j = 0; j < n; j++) {
        axpy(dk + rows[j] * stride + kv * D, 1.0f, d_keys + j * D, D);
        axpy(dv + rows[j] * stride + kv * D, 1.0f, d_values + j * D, D);
    }
}

/* Gradients into dq, dk, dv: rows with ``stride``, dk and dv initially zero; q, k, v: rows with ``in_stride``. Rows may belong to
 * several sequences, so each key head belongs to one thread. */
void varlen_attention_backward(const float *q, const float *k, const float *v, const i64 *row, const i64 *start,
                               const uint8_t *computed, const float *out, const float *lse, const float *d_out, float *dq,
                               float *dk, float *dv, i64 S, i64 longest, i64 H, i64 K, i64 D, i64 stride, i64 in_stride,
                               float scale) {
#pragma omp parallel for schedule(static)
    for (i64 kv = 0; kv < K; kv++) {
        float *scratch = malloc(longest * (4 * D + 2) * sizeof(float));
        for (i64 s = 0; s < S; s++) {
            i64 a = start[s], n = start[s + 1] - a;
#define ONE(size) \
    backward_key_head(q, k, v, row + a, computed + a, n, out, lse, d_out, dq, dk, dv, scratch, H, K, kv, size, stride, \
                      in_stride, scale)
            BY_HEAD_SIZE(ONE)
#undef ONE
        }
        free(scratch);
    }
}

/* Rotate the queries and keys of qkv [n, (H + 2K) D] in place, and copy keys and values to their columns of the cache
 * [rows, K, width, D]. cos and sin [context, D/2]. */
void rope_and_cache(float *qkv, const float *cos, const float *sin, const i64 *row, const i64 *position,
                    const int32_t *table, float *keys, float *values, i64 n, i64 H, i64 K, i64 D, i64 width, i64 pages) {
    i64 stride = (H + 2 * K) * D, half = D / 2;
#pragma omp parallel for schedule(static) if (n * stride > MIN_PARALLEL)
    for (i64 t = 0; t < n; t++) {
        float *token = qkv + t * stride;
        const float *c = cos + position[t] * half, *s = sin + position[t] * half;
        for (i64 h = 0; h < H + K; h++) {
            float *a = token + h * D, *b = a + half;
#pragma omp simd
            for (i64 j = 0; j < half; j++) {
                float x = a[j], y = b[j];
                a[j] = x * c[j] - y * s[j];
                b[j] = y * c[j] + x * s[j];
            }
        }
        i64 block = table ? table[row[t] * pages + position[t] / width] : row[t];
        for (i64 h = 0; h < K; h++) {
            i64 to = ((block * K + h) * width + position[t] % width) * D;
            memcpy(keys + to, token + (H + h) * D, D * sizeof(float));
            memcpy(values + to, token + (H + K + h) * D, D * sizeof(float));
        }
    }
}

/* ``columns``: where each column of the row is, relative to its key head, or NULL where they follow each other in ``block``. */
INLINE void cached_attention_token(const float *q, const float *keys, const float *values, i64 block, const i64 *columns,
                                   i64 size, float *out, float *p, i64 H, i64 K, i64 D, i64 width, float scale) {
    for (i64 h = 0; h < H; h++) {
        i64 at = (block * K + h / (H / K)) * width * D;
        float sum;
        softmax_weights(q + h * D, keys + at, columns, D, size, D, scale, p, &sum);
        weighted_sum(out + h * D, p, values + at, columns, D, size, D, 1.0f / sum);
    }
}

/* Attention of each token over the columns of its row up to its own: out [n, H, D]. ``table`` [rows, pages]: the pages of a row,
 * of ``width`` columns each; NULL where a row is one block of ``width`` columns. */
void cached_attention(const float *qkv, const i64 *row, const i64 *position, const int32_t *table, const float *keys,
                      const float *values, float *out, i64 n, i64 longest, i64 H, i64 K, i64 D, i64 width, i64 pages,
                      float scale) {
    i64 stride = (H + 2 * K) * D;
#pragma omp parallel if (n * H * D * longest > MIN_PARALLEL)
    {
        float *p = malloc(longest * sizeof(float));
        i64 *columns = table ? malloc(longest * sizeof(i64)) : NULL;
#pragma omp for schedule(dynamic, 4)
        for (i64 t = 0; t < n; t++) {
            i64 count = position[t] + 1;
            for (i64 first = 0; table && first < count; first += width) { /* page by page: a division a column is slow */
                i64 at = table[row[t] * pages + first / width] * K * width;
                for (i64 j = first; j < count && j < first + width; j++) columns[j] = at + j - first;
            }
#define ONE(size) \
    cached_attention_token(qkv + t * stride, keys, values, table ? 0 : row[t], columns, position[t] + 1, out + t * H * size, \
                           p, H, K, size, width, scale)
            BY_HEAD_SIZE(ONE)
#undef ONE
        }
        free(columns);
        free(p);
    }
}

/* ------------------------------------------------------------------ small batches: all layers in one call */

#define PANEL_COLUMNS 16 /* columns of a weight panel */
#define PANEL_VECTORS (PANEL_COLUMNS / VECTOR)
#define TILE_ROWS 6 /* rows of a tile: its sums stay in registers */

/* ``rows`` rows of a [.., n] times a panel [n, PANEL_COLUMNS], plus ``add`` unless NULL. */
INLINE void tile(const float *a, i64 n, const float *panel, const float *add, i64 add_stride, float *out, i64 stride,
                 int rows) {
    vec s[TILE_ROWS][PANEL_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < PANEL_VECTORS; v++) s[i][v] = add ? *(const vec *)(add + i * add_stride + v * VECTOR) : (vec){0};
    for (i64 k = 0; k < n; k++) {
        vec w[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) w[v] = *(const vec *)(panel + k * PANEL_COLUMNS + v * VECTOR);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) s[i][v] += a[i * n + k] * w[v];
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < PANEL_VECTORS; v++) *(vec *)(out + i * stride + v * VECTOR) = s[i][v];
}

/* out [L, N] = a [L, n] times panels [N / PANEL_COLUMNS, n, PANEL_COLUMNS], plus ``add``: rows with ``add_stride`` (0: one
 * row for all), which may be out itself. A row's result does not depend on the other rows. */
void panel_matmul(const float *a, const float *panels, const float *add, i64 add_stride, float *out, i64 L, i64 n, i64 N) {
#pragma omp parallel for schedule(static) if (L * n * N > MIN_PARALLEL)
    for (i64 p = 0; p < N / PANEL_COLUMNS; p++) {
        const float *panel = panels + p * n * PANEL_COLUMNS;
#define ROWS(count) \
    tile(a + i * n, n, panel, add ? add + i * add_stride + p * PANEL_COLUMNS : NULL, add_stride, \
         out + i * N + p * PANEL_COLUMNS, N, count)
        i64 i = 0;
        for (; i + TILE_ROWS <= L; i += TILE_ROWS) ROWS(TILE_ROWS);
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

/* Tokens x [L, d] of any cache rows through all layers, in place; each attends to the columns of its row up to its own. Without
 * ``last`` only the keys and values of the last layer are computed. ``workspace``: L * (d + (H + 2K) D + H D + 3 F) numbers. */
void forward_layers(float *x, const layer *layers, float *const *keys, float *const *values, const float *cos,
                    const float *sin, const i64 *row, const i64 *position, const int32_t *table, float *workspace, i64 L,
                    i64 count, i64 last, i64 d, i64 F, i64 H, i64 K, i64 D, i64 width, i64 pages, i64 longest, float scale,
                    float eps) {
    i64 wide = (H + 2 * K) * D;
    float *h = workspace, *qkv = h + L * d, *attention = qkv + L * wide;
    float *gate_up = attention + L * H * D, *act = gate_up + L * 2 * F;
    for (i64 i = 0; i < count; i++) {
        const layer *w = layers + i;
        add_norm(x, NULL, w->norm, eps, NULL, h, L, d);
        panel_matmul(h, w->qkv, w->qkv_bias, 0, qkv, L, d, wide);
        rope_and_cache(qkv, cos, sin, row, position, table, keys[i], values[i], L, H, K, D, width, pages);
        if (i == count - 1 && !last) return;
        cached_attention(qkv, row, position, table, keys[i], values[i], attention, L, longest, H, K, D, width, pages, scale);
        panel_matmul(attention, w->out, x, d, x, L, H * D, d);
        for (i64 t = 0; w->out_bias && t < L; t++) axpy(x + t * d, 1.0f, w->out_bias, d);
        add_norm(x, NULL, w->mlp_norm, eps, NULL, h, L, d);
        panel_matmul(h, w->gate_up, NULL, 0, gate_up, L, d, 2 * F);
        swiglu(gate_up, act, L, F);
        panel_matmul(act, w->down, x, d, x, L, F, d);
    }
}
