/* Products of a few rows of floats with 8- or 4-bit weights, straight from their levels.

   result[r][o] = bias[o] + sum over inputs i of x[r][i] * level[o][i] * scale[o][group of i]

   A row's sum is taken in one order whatever rows stand beside it. Inputs are filled up to P, whole groups of 64
   (8 bits) or 32 (4 bits); a byte of 4-bit levels holds input i in its low half and input i + P / 2 in its high half.
   Built where it runs, for the processor that it runs on: kernels/levels.py. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))
#define MOST 4 /* rows at once: their sums stay in registers, and a weight is made a float once for all of them */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

INLINE floats load(const float *from) {
    floats result;
    memcpy(&result, from, sizeof result);
    return result;
}

INLINE ints load_levels(const int8_t *from) { /* by hand: GCC 12 takes the generic way apart byte by byte */
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    bytes result;
    memcpy(&result, from, sizeof result);
    return __builtin_convertvector(result, ints);
#endif
}

INLINE float wide(uint16_t half) { /* bfloat16 */
    uint32_t bits = (uint32_t)half << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE float total(floats x) {
    float result = 0;
    for (int lane = 0; lane < LANES; lane++) result += x[lane];
    return result;
}

INLINE void eight(int rows, const float *x, long P, const int8_t *levels, const uint16_t *scales, float *sums) {
    floats whole[MOST] = {0};
    for (long group = 0; group < P / 64; group++) {
        floats part[MOST] = {0};
        for (int at = 0; at < 64; at += LANES) {
            floats weights = __builtin_convertvector(load_levels(levels + group * 64 + at), floats);
            for (int row = 0; row < rows; row++) part[row] += weights * load(x + row * P + group * 64 + at);
        }
        float scale = wide(scales[group]);
        for (int row = 0; row < rows; row++) whole[row] += part[row] * scale;
    }
    for (int row = 0; row < rows; row++) sums[row] = total(whole[row]);
}

INLINE void four(int rows, const float *x, long P, const int8_t *levels, const uint16_t *scales, float *sums) {
    floats whole[MOST] = {0};
    for (long at = 0; at < P / 2; at += LANES) {
        ints both = load_levels(levels + at);
        floats low = __builtin_convertvector((both << 28) >> 28, floats) * wide(scales[at / 32]);
        floats high = __builtin_convertvector(both >> 4, floats) * wide(scales[(at + P / 2) / 32]);
        for (int row = 0; row < rows; row++) {
            whole[row] += low * load(x + row * P + at);
            whole[row] += high * load(x + row * P + P / 2 + at);
        }
    }
    for (int row = 0; row < rows; row++) sums[row] = total(whole[row]);
}

INLINE void some(int bits, int rows, const float *x, long P, const int8_t *levels, const uint16_t *scales, float *sums) {
    if (bits == 8) eight(rows, x, P, levels, scales, sums);
    else four(rows, x, P, levels, scales, sums);
}

INLINE void all(int bits, const float *x, long rows, long P, const int8_t *levels, const uint16_t *scales,
                const float *bias, float *result, long outputs, int threads) {
    long bytes_of_row = P * bits / 8, groups = P / (bits == 8 ? 64 : 32);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long output = 0; output < outputs; output++) {
        const int8_t *own = levels + output * bytes_of_row;
        const uint16_t *scale = scales + output * groups;
        float add = bias ? bias[output] : 0;
        for (long row = 0; row < rows; row += MOST) {
            float sums[MOST];
            const float *from = x + row * P;
            long now = rows - row < MOST ? rows - row : MOST;
            switch (now) { /* constants, so that each is a program of its own */
            case 1: some(bits, 1, from, P, own, scale, sums); break;
            case 2: some(bits, 2, from, P, own, scale, sums); break;
            case 3: some(bits, 3, from, P, own, scale, sums); break;
            default: some(bits, 4, from, P, own, scale, sums);
            }
            for (long at = 0; at < now; at++) result[(row + at) * outputs + output] = sums[at] + add;
        }
    }
}

void product8(const float *x, long rows, long P, const int8_t *levels, const uint16_t *scales, const float *bias,
              float *result, long outputs, int threads) {
    all(8, x, rows, P, levels, scales, bias, result, outputs, threads);
}

void product4(const float *x, long rows, long P, const int8_t *levels, const uint16_t *scales, const float *bias,
              float *result, long outputs, int threads) {
    all(4, x, rows, P, levels, scales, bias, result, outputs, threads);
}
