/* The sum of contributions and the update by it, in one pass over main memory.
 *
 * torch has no kernel that reads more than two tensors, so a sum of n contributions and an update pass over the same
 * numbers n + 3 times. Here a block of them goes through all of it while it is in a core's first cache.
 *
 * Every operation is the one that torch's kernel does, rounded where that rounds (fmaf stands where torch's compiler
 * fused a product and a sum; nothing else may be: -ffp-contract=off). server/compiled.py compares
 * the bits before the first use, and uses this only where they are equal.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Elements that go through at a time. Few, so that a core waits for the lines of several tensors at once: blocks of 1024
 * take half as long again. */
#define BLOCK 64
/* Scratch places that a sum may need at most; library.py knows it, too. */
#define PLACES 8

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FOR_EACH_CPU
#endif
/* What is inlined is compiled for each kind of processor, too. */
#define INLINE static inline __attribute__((always_inline))

/* What is summed, and how. rows: the contributions. steps: triples (one, other, place): places below `count` are rows,
 * those from there on scratch. The sum is divided by `divisor`, or multiplied by `factor` if that is not 0. kept: where the
 * result is left, too; 0 if nowhere. No other argument overlaps it. */
struct sum {
    const float *const *rows;
    const int32_t *steps;
    int32_t count, length;
    float divisor, factor;
    float *kept;
};

/* What becomes of the sum. kind: an enum value. first: the state arrays have no history yet. a to h: numbers, see
 * `update`. */
struct formula {
    int32_t kind, negate, first;
    float a, b, c, d, e, f, g, h;
};

enum { COPY, ADD, SGD, ADAM };

/* Which text this was made of. */
const char paramserver_source[] = SOURCE;

/* n elements of the sum, from `at` on: in `total`, or where they lie if there is nothing to compute. */
INLINE const float *block_of_sum(const struct sum *sum, int64_t at, int n, float scratch[PLACES][BLOCK], float *total) {
    const float *last = sum->rows[0] + at;
    for (int32_t s = 0; s < sum->length; s++) {
        const int32_t *step = sum->steps + 3 * s;
        const float *one = step[0] < sum->count ? sum->rows[step[0]] + at : scratch[step[0] - sum->count];
        const float *other = step[1] < sum->count ? sum->rows[step[1]] + at : scratch[step[1] - sum->count];
        float *place = s + 1 == sum->length ? total : scratch[step[2] - sum->count];
        for (int i = 0; i < n; i++) place[i] = one[i] + other[i];
        last = place;
    }
    if (sum->factor != 0) {
        for (int i = 0; i < n; i++) total[i] = last[i] * sum->factor;
        last = total;
    } else if (sum->divisor != 1) {
        for (int i = 0; i < n; i++) total[i] = last[i] / sum->divisor;
        last = total;
    }
    return last;
}

/* weights: the old ones; out: the new ones, which no other argument overlaps. one, two: the state arrays, changed in
 * place. */
INLINE void update(const struct formula *formula, const float *gradient, const float *weights, float *restrict out,
                   float *restrict one, float *restrict two, int n) {
    const struct formula r = *formula;
    if (r.kind == COPY) {
        for (int i = 0; i < n; i++) out[i] = gradient[i];
    } else if (r.kind == ADD) { /* a: factor */
        for (int i = 0; i < n; i++) out[i] = fmaf(gradient[i], r.a, weights[i]);
    } else if (r.kind == SGD) { /* a: -lr, b: weight decay, c: momentum, d: 1 - dampening, e: nesterov */
        for (int i = 0; i < n; i++) {
            float g = r.negate ? -gradient[i] : gradient[i];
            if (r.b != 0) g = fmaf(weights[i], r.b, g);
            if (r.c != 0) {
                float buffer = r.first ? g : fmaf(g, r.d, one[i] * r.c);
                one[i] = buffer;
                g = r.e != 0 ? fmaf(buffer, r.c, g) : buffer;
            }
            out[i] = fmaf(g, r.a, weights[i]);
        }
    } else { /* a: 1 - lr * decay, b: L2, c: 1 - beta1, d: beta2, e: 1 - beta2, f: sqrt(bias 2), g: eps, h: -step */
        for (int i = 0; i < n; i++) {
            float g = r.negate ? -gradient[i] : gradient[i], x = weights[i];
            if (r.b != 0) g = fmaf(x, r.b, g);
            if (r.a != 1) x *= r.a;
            float mean = r.c < 0.5f ? fmaf(r.c, g - one[i], one[i]) : fmaf(r.c - 1, g - one[i], g);
            float square = fmaf(r.e * g, g, two[i] * r.d);
            one[i] = mean;
            two[i] = square;
            out[i] = x + r.h * mean / (sqrtf(square) / r.f + r.g);
        }
    }
}

/* Sums, and updates by the sum, `elements` numbers. Returns the sum of all sums: finite only if each of them is. */
FOR_EACH_CPU float paramserver_step(const struct sum *sum, const struct formula *formula, const float *weights,
                                    float *out, float *one, float *two, int64_t elements) {
    float scratch[PLACES][BLOCK] __attribute__((aligned(64))), total[BLOCK] __attribute__((aligned(64)));
    float seen[16] = {0}, all = 0;
    for (int64_t at = 0; at < elements; at += BLOCK) {
        int n = elements - at < BLOCK ? (int)(elements - at) : BLOCK, i = 0;
        const float *gradient = block_of_sum(sum, at, n, scratch, total);
        for (; i + 16 <= n; i += 16)
            for (int lane = 0; lane < 16; lane++) seen[lane] += gradient[i + lane];
        for (; i < n; i++) seen[0] += gradient[i];
        if (sum->kept) memcpy(sum->kept + at, gradient, n * sizeof(float));
        update(formula, gradient, weights ? weights + at : 0, out + at, one ? one + at : 0, two ? two + at : 0, n);
    }
    for (int lane = 0; lane < 16; lane++) all += seen[lane];
    return all;
}
