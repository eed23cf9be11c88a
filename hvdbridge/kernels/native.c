/* What the CPU kernels do, as loops that read memory once. native.py compiles, loads and describes this file.

   Every function but the products of matrices that enter a sum over ranks gives the bits of the torch operations beside
   which it stands: sums in the same order, no fused multiply-add (-ffp-contract=off), rounding half to even. In a block
   that is not finite, whose scale says so, codes may differ: any will do. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#define TINY 0x1p-126f

static inline int32_t bits_of(float x) { int32_t i; memcpy(&i, &x, 4); return i; }
static inline float float_of(int32_t i) { float x; memcpy(&x, &i, 4); return x; }

/* Where a block lies (quantise.blocks_in): `count` elements from `start` of a vector, their codes from `code` of row `row`
   of the codes, their scale the `scale`-th of that row. Rows are `stride` bytes apart; a scale may lie at any byte.
   Randomness calls the first element `number`. */
struct place { int64_t start; int32_t count, row, code, scale; uint32_t number; int32_t unused; };

/* quantise.blocks_in: the blocks of some quantise.Strip. Those whose parts lie between each other's take turns, so that
   the vector is gone through in its order: the other way a coder takes up to three times as long. */
struct strip { int64_t start, hop, parts, size, row, code, scale, number, skip; };

void lay_blocks(const struct strip *restrict strips, int64_t number, int64_t width, struct place *restrict out)
{
    const struct strip *end = strips + number;
    for (const struct strip *first = strips, *next; first < end; first = next) {
        for (next = first + 1; next < end && next->hop == first->hop && next->start == next[-1].start + next->size;)
            next++;
        for (int64_t part = 0, left = 1; left; part++) {
            left = 0;
            for (const struct strip *at = first; at < next; at++) {
                if (part >= at->parts) continue;
                left |= part + 1 < at->parts;
                int64_t start = at->start + part * at->hop, code = at->code + part * at->size;
                int64_t scale = at->scale + part * ((at->size + width - 1) / width);
                int64_t number = at->number + part * at->skip;
                for (int64_t i = 0; i < at->size; i += width) {
                    int64_t elements = at->size - i < width ? at->size - i : width;
                    *out++ = (struct place){start + i, (int32_t)elements, (int32_t)at->row, (int32_t)(code + i),
                                            (int32_t)scale++, (uint32_t)(number + i), 0};
                }
            }
        }
    }
}

static inline float float_at(const uint8_t *at) { float x; memcpy(&x, at, 4); return x; }

/* pack._squeeze and pack._spread: eight codes of one byte each, and as many bytes as a code has bits. */
static inline uint64_t load(const uint8_t *at) { uint64_t w; memcpy(&w, at, 8); return w; } /* wherever it lies */

static inline uint64_t fields(int every, int width)
{
    uint64_t mask = 0;
    for (int at = 0; at < 64; at += every) mask |= ((1ull << width) - 1) << at;
    return mask;
}

#define EVERY(BITS) \
    static void squeeze##BITS(const uint8_t *restrict words, int64_t count, uint8_t *restrict out) \
    { \
        const uint64_t low8 = fields(16, BITS), low16 = fields(32, 2 * BITS), low32 = fields(64, 4 * BITS); \
        for (int64_t i = 0; i < count; i++) { \
            uint64_t w = load(words + 8 * i); \
            w = (w & low8) | (w >> (8 - BITS) & low8 << BITS); \
            w = (w & low16) | (w >> 2 * (8 - BITS) & low16 << 2 * BITS); \
            w = (w & low32) | (w >> 4 * (8 - BITS) & low32 << 4 * BITS); \
            memcpy(out + i * BITS, &w, BITS); \
        } \
    } \
    static void spread##BITS(const uint8_t *restrict packed, int64_t count, uint64_t *restrict words) \
    { \
        const uint64_t low8 = fields(16, BITS), low16 = fields(32, 2 * BITS), low32 = fields(64, 4 * BITS); \
        for (int64_t i = 0; i < count; i++) { \
            uint64_t w = 0; \
            memcpy(&w, packed + i * BITS, BITS); \
            w = (w & low32) | (w & low32 << 4 * BITS) << 4 * (8 - BITS); \
            w = (w & low16) | (w & low16 << 2 * BITS) << 2 * (8 - BITS); \
            words[i] = (w & low8) | (w & low8 << BITS) << (8 - BITS); \
        } \
    }
EVERY(2) EVERY(3) EVERY(4) EVERY(5) EVERY(6) EVERY(7)

static void squeeze1(const uint8_t *restrict words, int64_t count, uint8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(load(words + 8 * i) * 0x0102040810204080ull >> 56);
}

static void spread1(const uint8_t *restrict packed, int64_t count, uint64_t *restrict words)
{
    for (int64_t i = 0; i < count; i++) { /* each byte keeps its own bit, and one bit carries to the top */
        uint64_t w = packed[i] * 0x0101010101010101ull & 0x8040201008040201ull;
        words[i] = (w + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
    }
}

void squeeze(const uint8_t *words, int64_t count, int32_t bits, uint8_t *out)
{
    static void (*const of[])(const uint8_t *, int64_t, uint8_t *) = {
        0, squeeze1, squeeze2, squeeze3, squeeze4, squeeze5, squeeze6, squeeze7};
    of[bits](words, count, out);
}

void spread(const uint8_t *packed, int64_t count, int32_t bits, uint64_t *words)
{
    static void (*const of[])(const uint8_t *, int64_t, uint64_t *) = {
        0, spread1, spread2, spread3, spread4, spread5, spread6, spread7};
    of[bits](packed, count, words);
}

/* The codes of a block in a row where they have `bits` each: 8, or fewer from any bit on. Eight codes are as many bytes
   as a code has bits; where a block begins or ends among eight, others have the rest. */
enum { WIDTH = 1024 };
struct some { uint64_t words[WIDTH / 8 + 2]; };

static inline int whole(const struct place *at) { return at->code % 8 == 0 && at->count % 8 == 0; }
static inline int64_t groups(const struct place *at) { return (at->code % 8 + at->count + 7) / 8; }
static inline int64_t bytes(const struct place *at, int32_t bits) { return ((at->code % 8 + at->count) * bits + 7) / 8; }

/* Where to write codes of a byte each, and then have them put into the row, whose bits there are zeros. */
static inline uint8_t *codes_for(const struct place *at, int32_t bits, uint8_t *row, struct some *some)
{
    if (bits == 8) return row + at->code;
    some->words[0] = some->words[groups(at) - 1] = 0;
    return (uint8_t *)some->words + at->code % 8;
}

static inline void put_codes(const struct place *at, int32_t bits, uint8_t *row, const struct some *some)
{
    if (bits == 8) return;
    uint8_t *out = row + at->code / 8 * bits, packed[WIDTH + 16];
    squeeze((const uint8_t *)some->words, groups(at), bits, whole(at) ? out : packed);
    if (whole(at)) return;
    for (int64_t i = 0; i < bytes(at, bits); i++) out[i] |= packed[i];
}

/* The codes of a block, a byte each. */
static inline const uint8_t *codes_of(const struct place *at, int32_t bits, const uint8_t *row, struct some *some)
{
    if (bits == 8) return row + at->code;
    const uint8_t *from = row + at->code / 8 * bits;
    uint8_t packed[WIDTH + 16];
    if (!whole(at)) from = memcpy(packed, from, (size_t)bytes(at, bits)); /* behind the last there may be nothing */
    spread(from, groups(at), bits, some->words);
    return (uint8_t *)some->words + at->code % 8;
}

/* random.hashed_bits. */
static inline uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}

static inline uint32_t hashed(uint32_t number, uint32_t low, uint32_t high)
{
    return mix(mix(number + low) ^ high) >> 8;
}

/* Of a block's i-th element: from 0 to below 1, exactly. */
static inline float dice(const struct place *at, int64_t i, uint32_t low, uint32_t high)
{
    return (float)(int32_t)hashed(at->number + (uint32_t)i, low, high) * 0x1p-24f;
}

void hash_bits(const uint32_t *restrict numbers, int64_t count, uint32_t low, uint32_t high, uint32_t *restrict out)
{
    for (int64_t i = 0; i < count; i++) out[i] = hashed(numbers[i], low, high);
}

/* As integers NaN is above inf, and inf above all numbers. */
static inline float largest(const float *x, int64_t count)
{
    int32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        top = magnitude > top ? magnitude : top;
    }
    return float_of(top);
}

/* quantise.row_sums, of `width` numbers, which are spoilt: the order of additions is that of a full block. */
static inline float sum_of(float *restrict x, int64_t width)
{
    for (int64_t half = width / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) x[i] = x[i] + x[i + half];
    return x[0];
}

/* quantise.norms. */
static inline float norm(const float *restrict x, int64_t count, int64_t width, float *restrict room)
{
    float top = largest(x, count), safe = top < TINY ? TINY : top, inverse = 1.0f / safe;
    for (int64_t i = 0; i < count; i++) {
        float y = x[i] * inverse;
        room[i] = y * y;
    }
    for (int64_t i = count; i < width; i++) room[i] = 0.0f;
    return sqrtf(sum_of(room, width)) * safe;
}

/* quantise.Linear: by the largest magnitude or, with `l2`, by the norm; to the nearest or, with `random`, at random.
   `keep_rest`: the vector becomes what the codes do not say. */
void linear_encode(float *restrict vector, const struct place *restrict places, int64_t blocks, int64_t width,
                   int32_t levels, int32_t offset, int32_t mask, int32_t bits, int32_t l2, int32_t random, uint32_t low,
                   uint32_t high, uint8_t *restrict codes, int64_t code_stride, uint8_t *restrict scales,
                   int64_t scale_stride, int32_t keep_rest)
{
    struct some some;
    float room[WIDTH];
    for (const struct place *at = places; at < places + blocks; at++) {
        float *x = vector + at->start;
        uint8_t *row = codes + at->row * code_stride, *code = codes_for(at, bits, row, &some);
        float scale = (l2 ? norm(x, at->count, width, room) : largest(x, at->count)) / (float)levels;
        scale = scale < TINY ? TINY : scale;
        memcpy(scales + at->row * scale_stride + 4 * (int64_t)at->scale, &scale, 4);
        float inverse = 1.0f / scale, last = (float)levels;
        if (random)
            for (int64_t i = 0; i < at->count; i++) {
                float y = floorf(x[i] * inverse + dice(at, i, low, high));
                y = y > last ? last : y < -last ? -last : y;
                code[i] = (uint8_t)(((int32_t)y + offset) & mask);
            }
        else
            for (int64_t i = 0; i < at->count; i++)
                code[i] = (uint8_t)(((int32_t)rintf(x[i] * inverse) + offset) & mask);
        put_codes(at, bits, row, &some);
        if (!keep_rest) continue;
        if (offset == 0)
            for (int64_t i = 0; i < at->count; i++) x[i] -= (float)(int8_t)code[i] * scale;
        else
            for (int64_t i = 0; i < at->count; i++) x[i] -= (float)(code[i] - offset) * scale;
    }
}

/* Its inverse, of `messages` times `rows` rows: the vector is, or with `add` 1 or -1 changes by, what they say. */
void linear_decode(const uint8_t *restrict codes, int64_t code_stride, const uint8_t *restrict scales,
                   int64_t scale_stride, int64_t messages, int64_t rows, const struct place *restrict places,
                   int64_t blocks, int32_t offset, int32_t bits, float *restrict vector, int32_t add)
{
    struct some some;
    for (const struct place *at = places; at < places + blocks; at++) {
        float *out = vector + at->start;
        for (int64_t message = 0; message < messages; message++) {
            int64_t row = message * rows + at->row;
            const uint8_t *code = codes_of(at, bits, codes + row * code_stride, &some);
            float scale = float_at(scales + row * scale_stride + 4 * (int64_t)at->scale);
            float signed_scale = add < 0 ? -scale : scale;
            int writes = add == 0 && message == 0;
            if (offset == 0 && writes)
                for (int64_t i = 0; i < at->count; i++) out[i] = (float)(int8_t)code[i] * scale;
            else if (offset == 0)
                for (int64_t i = 0; i < at->count; i++) out[i] += (float)(int8_t)code[i] * signed_scale;
            else if (writes)
                for (int64_t i = 0; i < at->count; i++) out[i] = (float)(code[i] - offset) * scale;
            else
                for (int64_t i = 0; i < at->count; i++) out[i] += (float)(code[i] - offset) * signed_scale;
        }
    }
}

/* quantise.Ternary: of each block, scale and limit are given, side by side. A code has a byte. */
void ternary_encode(const float *restrict vector, const struct place *restrict places, int64_t blocks,
                    const float *restrict given, uint32_t low, uint32_t high, uint8_t *restrict codes)
{
    for (const struct place *at = places; at < places + blocks; at++) {
        const float *x = vector + at->start;
        uint8_t *code = codes + at->code;
        float scale = given[2 * (int64_t)at->scale], limit = given[2 * (int64_t)at->scale + 1];
        float inverse = 1.0f / (scale < TINY ? TINY : scale);
        limit = limit < TINY ? TINY : limit;
        for (int64_t i = 0; i < at->count; i++) {
            float y = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
            y = floorf(y * inverse + dice(at, i, low, high));
            code[i] = (uint8_t)(((int32_t)(y > 1.0f ? 1.0f : y < -1.0f ? -1.0f : y) + 1) & 3);
        }
    }
}

/* quantise.Float8: 3 bits of fraction and a bias of 7 (e4m3), or 2 and 15 (e5m2). Nothing is above the largest number,
   and of what is not finite e4m3 knows nothing: its scale does. */
static inline uint8_t narrow(float y, int32_t digits, int32_t bias)
{
    int32_t word = bits_of(y), magnitude = word & 0x7fffffff, drop = 23 - digits, code;
    if (magnitude > 0x7f800000)
        code = 0x7f;
    else if (magnitude < (128 - bias) << 23)
        code = (int32_t)rintf(float_of(magnitude) * float_of((126 + bias + digits) << 23));
    else
        code = ((magnitude + (1 << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop) - ((127 - bias) << digits);
    return (uint8_t)(code | (word >> 24 & 0x80));
}

static inline float wide(uint8_t code, int32_t digits, int32_t bias)
{
    int32_t exponent = (code & 0x7f) >> digits, fraction = code & ((1 << digits) - 1);
    if (digits == 2 && exponent == 31) return fraction ? NAN : code & 0x80 ? -INFINITY : INFINITY;
    float magnitude = exponent ? float_of((exponent + 127 - bias) << 23 | fraction << (23 - digits))
                               : (float)fraction * float_of((128 - bias - digits) << 23);
    return code & 0x80 ? -magnitude : magnitude;
}

void float8_encode(float *restrict vector, const struct place *restrict places, int64_t blocks, int32_t digits,
                   int32_t bias, float top, int32_t random, uint32_t low, uint32_t high, uint8_t *restrict codes,
                   int64_t code_stride, uint8_t *restrict scales, int64_t scale_stride, int32_t keep_rest)
{
    const float smallest = float_of((128 - bias) << 23), unit = float_of((127 - digits) << 23);
    float value[256], room[WIDTH];
    for (int i = 0; i < 256; i++) value[i] = wide((uint8_t)i, digits, bias);
    for (const struct place *at = places; at < places + blocks; at++) {
        float *x = vector + at->start;
        uint8_t *code = codes + at->row * code_stride + at->code;
        float scale = largest(x, at->count) / top;
        scale = scale < TINY ? TINY : scale;
        memcpy(scales + at->row * scale_stride + 4 * (int64_t)at->scale, &scale, 4);
        float inverse = 1.0f / scale;
        for (int64_t i = 0; i < at->count; i++) room[i] = x[i] * inverse;
        if (random)
            for (int64_t i = 0; i < at->count; i++) {
                float power = float_of(bits_of(room[i]) & 0x7f800000), step = (power < smallest ? smallest : power) * unit;
                float y = floorf(room[i] / step + dice(at, i, low, high)) * step;
                room[i] = y > top ? top : y < -top ? -top : y;
            }
        for (int64_t i = 0; i < at->count; i++) code[i] = narrow(room[i], digits, bias);
        if (keep_rest)
            for (int64_t i = 0; i < at->count; i++) x[i] -= value[code[i]] * scale;
    }
}

void float8_decode(const uint8_t *restrict codes, int64_t code_stride, const uint8_t *restrict scales,
                   int64_t scale_stride, int64_t messages, int64_t rows, const struct place *restrict places,
                   int64_t blocks, int32_t digits, int32_t bias, float *restrict vector, int32_t add)
{
    float value[256];
    for (int i = 0; i < 256; i++) value[i] = wide((uint8_t)i, digits, bias);
    for (const struct place *at = places; at < places + blocks; at++) {
        float *out = vector + at->start;
        for (int64_t message = 0; message < messages; message++) {
            int64_t row = message * rows + at->row;
            const uint8_t *code = codes + row * code_stride + at->code;
            float scale = float_at(scales + row * scale_stride + 4 * (int64_t)at->scale);
            if (add == 0 && message == 0)
                for (int64_t i = 0; i < at->count; i++) out[i] = value[code[i]] * scale;
            else if (add >= 0)
                for (int64_t i = 0; i < at->count; i++) out[i] += value[code[i]] * scale;
            else
                for (int64_t i = 0; i < at->count; i++) out[i] -= value[code[i]] * scale;
        }
    }
}

/* quantise.PowerOfTwo as it travels: a row has `length` exponents, a byte each, and behind them the signs, a bit each. */
void power_encode(float *restrict vector, const struct place *restrict places, int64_t blocks, uint32_t low,
                  uint32_t high, uint8_t *restrict codes, int64_t code_stride, int64_t length, int32_t keep_rest)
{
    struct some some;
    for (const struct place *at = places; at < places + blocks; at++) {
        float *x = vector + at->start;
        uint8_t *row = codes + at->row * code_stride, *exponent = row + at->code;
        uint8_t *sign = codes_for(at, 1, row + length, &some);
        for (int64_t i = 0; i < at->count; i++) {
            int32_t word = bits_of(x[i]), magnitude = word & 0x7fffffff;
            int32_t finite = magnitude < 0x7f800000, number = magnitude < 0x7f7fffff ? magnitude : 0x7f7fffff;
            int32_t carry = (int32_t)(hashed(at->number + (uint32_t)i, low, high) >> 1), raised = (number + carry) >> 23;
            exponent[i] = (uint8_t)(!finite ? 255 : raised < 254 ? raised : 254);
            sign[i] = word < 0;
        }
        put_codes(at, 1, row + length, &some);
        if (keep_rest)
            for (int64_t i = 0; i < at->count; i++)
                x[i] -= float_of((int32_t)((uint32_t)exponent[i] << 23 | (uint32_t)sign[i] << 31));
    }
}

void power_decode(const uint8_t *restrict codes, int64_t code_stride, int64_t length, int64_t messages, int64_t rows,
                  const struct place *restrict places, int64_t blocks, float *restrict vector, int32_t add)
{
    struct some some;
    for (const struct place *at = places; at < places + blocks; at++) {
        float *out = vector + at->start;
        for (int64_t message = 0; message < messages; message++) {
            const uint8_t *row = codes + (message * rows + at->row) * code_stride, *exponent = row + at->code;
            const uint8_t *sign = codes_of(at, 1, row + length, &some);
            uint32_t flip = add < 0;
            if (add == 0 && message == 0)
                for (int64_t i = 0; i < at->count; i++)
                    out[i] = float_of((int32_t)((uint32_t)exponent[i] << 23 | (uint32_t)sign[i] << 31));
            else
                for (int64_t i = 0; i < at->count; i++)
                    out[i] += float_of((int32_t)((uint32_t)exponent[i] << 23 | ((uint32_t)sign[i] ^ flip) << 31));
        }
    }
}

/* signs.ScaledSign. */
void sign_encode(float *restrict vector, const struct place *restrict places, int64_t blocks, int64_t width,
                 int32_t bits, uint8_t *restrict codes, int64_t code_stride, uint8_t *restrict scales,
                 int64_t scale_stride, int32_t keep_rest)
{
    struct some some;
    float room[WIDTH];
    for (const struct place *at = places; at < places + blocks; at++) {
        float *x = vector + at->start;
        uint8_t *row = codes + at->row * code_stride, *code = codes_for(at, bits, row, &some);
        for (int64_t i = 0; i < at->count; i++) room[i] = fabsf(x[i]);
        for (int64_t i = at->count; i < width; i++) room[i] = 0.0f;
        float scale = sum_of(room, width) / (float)at->count;
        memcpy(scales + at->row * scale_stride + 4 * (int64_t)at->scale, &scale, 4);
        for (int64_t i = 0; i < at->count; i++) code[i] = x[i] >= 0.0f;
        put_codes(at, bits, row, &some);
        if (!keep_rest) continue;
        float twice = 2.0f * scale;
        for (int64_t i = 0; i < at->count; i++) x[i] -= ((float)code[i] - 0.5f) * twice;
    }
}

void sign_decode(const uint8_t *restrict codes, int64_t code_stride, const uint8_t *restrict scales,
                 int64_t scale_stride, int64_t messages, int64_t rows, const struct place *restrict places,
                 int64_t blocks, int32_t bits, float *restrict vector, int32_t add)
{
    struct some some;
    for (const struct place *at = places; at < places + blocks; at++) {
        float *out = vector + at->start;
        for (int64_t message = 0; message < messages; message++) {
            int64_t row = message * rows + at->row;
            const uint8_t *code = codes_of(at, bits, codes + row * code_stride, &some);
            float scale = 2.0f * float_at(scales + row * scale_stride + 4 * (int64_t)at->scale);
            if (add == 0 && message == 0)
                for (int64_t i = 0; i < at->count; i++) out[i] = ((float)code[i] - 0.5f) * scale;
            else if (add >= 0)
                for (int64_t i = 0; i < at->count; i++) out[i] += ((float)code[i] - 0.5f) * scale;
            else
                for (int64_t i = 0; i < at->count; i++) out[i] -= ((float)code[i] - 0.5f) * scale;
        }
    }
}

/* A bit for each of 32 whose magnitude is not below the limit. A compiler finds no instruction for it. */
static inline uint32_t reached(const int32_t *bits, int32_t limit, int32_t mask)
{
    uint32_t word = 0;
#if defined(__AVX512F__)
    for (int j = 0; j < 32; j += 16) {
        __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(bits + j), _mm512_set1_epi32(mask));
        word |= (uint32_t)_mm512_cmpge_epi32_mask(magnitudes, _mm512_set1_epi32(limit)) << j;
    }
#elif defined(__AVX2__)
    for (int j = 0; j < 32; j += 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(bits + j));
        __m256i magnitudes = _mm256_and_si256(x, _mm256_set1_epi32(mask));
        __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(limit), magnitudes);
        word |= (uint32_t)(~_mm256_movemask_ps(_mm256_castsi256_ps(below)) & 0xFF) << j;
    }
#else
    for (int j = 0; j < 32; j++) word |= (uint32_t)((bits[j] & mask) >= limit) << j;
#endif
    return word;
}

/* select.reaching: positions of what is not below the limit, ascending; how many, or -1: more than there is room. */
int64_t reaching(const int32_t *restrict bits, int64_t count, int32_t limit, int32_t mask, int64_t *restrict positions,
                 int64_t room)
{
    int64_t found = 0, i = 0;
    for (; i + 32 <= count; i += 32)
        for (uint32_t word = reached(bits + i, limit, mask); word; word &= word - 1) {
            if (found == room) return -1;
            positions[found++] = i + __builtin_ctz(word);
        }
    for (; i < count; i++)
        if ((bits[i] & mask) >= limit) {
            if (found == room) return -1;
            positions[found++] = i;
        }
    return found;
}

/* matrices.project and matrices.outer: matrices beside few vectors, up to four at a time, in one pass over the
   matrix, wherever it lies. A sum is made in LANES and these in halves, or row by row in groups of ROWS: its order
   depends on the shape alone. The bits are not those of a BLAS, whose order of additions nobody knows. */
#define TOGETHER 4
#define HEIGHT 4
#define LANES 8
#define ROWS 64
#define PIECE 512
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

static inline float added(lanes sum)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sum[lane] += sum[lane + half];
    return sum[0];
}

/* `height` rows times `n` vectors. */
INLINE void dots(const float *restrict x, const float *restrict vectors, int64_t cols, const int height, const int n,
                 float *restrict out, int64_t rows)
{
    lanes sum[HEIGHT][TOGETHER];
    for (int r = 0; r < height; r++)
        for (int k = 0; k < n; k++) sum[r][k] = (lanes){0};
    int64_t i = 0;
    for (; i + LANES <= cols; i += LANES)
        for (int k = 0; k < n; k++) {
            lanes vector = *(const lanes *)(vectors + k * cols + i);
            for (int r = 0; r < height; r++) sum[r][k] += *(const lanes *)(x + r * cols + i) * vector;
        }
    for (int k = 0; k < n; k++)
        for (int r = 0; r < height; r++) {
            for (int64_t j = i; j < cols; j++) sum[r][k][j - i] += x[r * cols + j] * vectors[k * cols + j];
            out[k * rows + r] = added(sum[r][k]);
        }
}

INLINE void some_dots(const float *restrict x, const float *restrict vectors, int64_t rows, int64_t cols, const int n,
                      float *restrict out)
{
    int64_t r = 0;
    for (; r + HEIGHT <= rows; r += HEIGHT) dots(x + r * cols, vectors, cols, HEIGHT, n, out + r, rows);
    for (; r < rows; r++) dots(x + r * cols, vectors, cols, 1, n, out + r, rows);
}

/* out [batch, rank, rows] = vectors [batch, rank, cols] times each row of matrices [batch, rows, cols]. */
void project_rows(const float *restrict matrices, int64_t pitch, int64_t batch, int64_t rows, int64_t cols,
                  const float *restrict vectors, int64_t vectors_pitch, int64_t rank, float *restrict out,
                  int64_t out_pitch)
{
    for (int64_t b = 0; b < batch; b++) {
        const float *x = matrices + b * pitch, *v = vectors + b * vectors_pitch;
        float *to = out + b * out_pitch;
        for (int64_t k = TOGETHER; k <= rank; k += TOGETHER, v += TOGETHER * cols, to += TOGETHER * rows)
            some_dots(x, v, rows, cols, TOGETHER, to);
        switch (rank % TOGETHER) {
        case 3: some_dots(x, v, rows, cols, 3, to); break;
        case 2: some_dots(x, v, rows, cols, 2, to); break;
        case 1: some_dots(x, v, rows, cols, 1, to); break;
        }
    }
}

INLINE void columns(const float *restrict x, int64_t rows, int64_t cols, int64_t width, const float *restrict vectors,
                    const int n, float *restrict out)
{
    float total[TOGETHER][PIECE] = {{0}}, some[TOGETHER][PIECE];
    for (int64_t first = 0; first < rows; first += ROWS) {
        int64_t last = first + ROWS < rows ? first + ROWS : rows, r = first;
        memset(some, 0, sizeof some);
        for (; r + 4 <= last; r += 4) {
            const float *x0 = x + r * cols, *x1 = x0 + cols, *x2 = x1 + cols, *x3 = x2 + cols;
            for (int k = 0; k < n; k++) {
                const float *w = vectors + k * rows + r;
                for (int64_t c = 0; c < width; c++)
                    some[k][c] = some[k][c] + w[0] * x0[c] + w[1] * x1[c] + w[2] * x2[c] + w[3] * x3[c];
            }
        }
        for (; r < last; r++)
            for (int k = 0; k < n; k++)
                for (int64_t c = 0; c < width; c++) some[k][c] += vectors[k * rows + r] * x[r * cols + c];
        for (int k = 0; k < n; k++)
            for (int64_t c = 0; c < width; c++) total[k][c] += some[k][c];
    }
    for (int k = 0; k < n; k++) memcpy(out + k * cols, total[k], 4 * (size_t)width);
}

/* out [batch, rank, cols] = vectors [batch, rank, rows] times matrices [batch, rows, cols]. */
void project_columns(const float *restrict matrices, int64_t pitch, int64_t batch, int64_t rows, int64_t cols,
                     const float *restrict vectors, int64_t vectors_pitch, int64_t rank, float *restrict out,
                     int64_t out_pitch)
{
    for (int64_t b = 0; b < batch; b++)
        for (int64_t c = 0; c < cols; c += PIECE) {
            const float *x = matrices + b * pitch + c, *v = vectors + b * vectors_pitch;
            float *to = out + b * out_pitch + c;
            int64_t width = c + PIECE <= cols ? PIECE : cols - c, k = 0;
            for (; k + TOGETHER <= rank; k += TOGETHER) columns(x, rows, cols, width, v + k * rows, TOGETHER, to + k * cols);
            for (; k < rank; k++) columns(x, rows, cols, width, v + k * rows, 1, to + k * cols);
        }
}

/* matrices [batch, rows, cols] become, or with `take` are lessened by, p [batch, rank, rows] transposed times q [batch,
   rank, cols]. What they become has the bits of matrices.outer: products rounded, added in the order of the vectors.
   At most four vectors (matrices.FEW). */
#define EACH(SUM) for (int64_t c = 0; c < cols; c++) x[c] SUM
void outer(float *restrict matrices, int64_t pitch, int64_t batch, int64_t rows, int64_t cols, const float *restrict p,
           int64_t p_pitch, const float *restrict q, int64_t q_pitch, int64_t rank, int32_t take)
{
    for (int64_t b = 0; b < batch; b++)
        for (int64_t r = 0; r < rows; r++) {
            float *x = matrices + b * pitch + r * cols;
            const float *w = p + b * p_pitch + r, *v0 = q + b * q_pitch, *v1 = v0 + cols, *v2 = v1 + cols, *v3 = v2 + cols;
            float w0 = w[0], w1 = rank > 1 ? w[rows] : 0, w2 = rank > 2 ? w[2 * rows] : 0, w3 = rank > 3 ? w[3 * rows] : 0;
            switch (2 * rank + !!take) {
            case 8: EACH( = w0 * v0[c] + w1 * v1[c] + w2 * v2[c] + w3 * v3[c]); break;
            case 9: EACH(-= w0 * v0[c] + w1 * v1[c] + w2 * v2[c] + w3 * v3[c]); break;
            case 6: EACH( = w0 * v0[c] + w1 * v1[c] + w2 * v2[c]); break;
            case 7: EACH(-= w0 * v0[c] + w1 * v1[c] + w2 * v2[c]); break;
            case 4: EACH( = w0 * v0[c] + w1 * v1[c]); break;
            case 5: EACH(-= w0 * v0[c] + w1 * v1[c]); break;
            case 2: EACH( = w0 * v0[c]); break;
            case 3: EACH(-= w0 * v0[c]); break;
            }
        }
}

/* orthogonal.orthonormal, of one matrix [rank, length]: what it says step by step. `work`: 2 rank (length + rank) + 2
   rank numbers. Sums are exact, so they may be made in LANES. */
typedef double wide_lanes __attribute__((vector_size(8 * LANES), aligned(8)));

static double inner(const double *restrict x, const double *restrict y, int64_t length)
{
    wide_lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= length; i += LANES) sum += *(const wide_lanes *)(x + i) * *(const wide_lanes *)(y + i);
    for (; i < length; i++) sum[0] += x[i] * y[i];
    for (int lane = 1; lane < LANES; lane++) sum[0] += sum[lane];
    return sum[0];
}

void orthonormal(const float *restrict matrix, int64_t rank, int64_t length, double high_steps, double low_steps,
                 double nothing, double epsilon, double *restrict work, float *restrict out)
{
    double *high = work, *low = high + rank * length, *gram = low + rank * length, *change = gram + rank * rank;
    double *unit = change + rank * rank, *first = unit + rank;
    for (int64_t i = 0; i < rank; i++) {
        const float *x = matrix + i * length;
        double *h = high + i * length, *l = low + i * length;
        int32_t top = 0; /* NaN is above all */
        for (int64_t n = 0; n < length; n++) {
            int32_t magnitude = bits_of(x[n]) & 0x7fffffff;
            top = magnitude > top ? magnitude : top;
        }
        unit[i] = top == 0 ? 1.0 : (double)float_of(top);
        double step = unit[i] / high_steps;
        for (int64_t n = 0; n < length; n++) {
            double all = (double)x[n] / step;
            h[n] = rint(all);
            l[n] = rint((all - h[n]) * low_steps);
        }
    }
    for (int64_t i = 0; i < rank; i++)
        for (int64_t j = 0; j <= i; j++) {
            const double *hi = high + i * length, *hj = high + j * length, *li = low + i * length, *lj = low + j * length;
            double mixed = inner(hi, lj, length) + inner(li, hj, length), lows = inner(li, lj, length) / low_steps;
            double both = (inner(hi, hj, length) + (mixed + lows) / low_steps) / (high_steps * high_steps);
            gram[i * rank + j] = gram[j * rank + i] = both;
        }
    for (int64_t i = 0; i < rank * length; i++) high[i] = (high[i] + low[i] / low_steps) / high_steps;
    for (int64_t i = 0; i < rank; i++) {
        first[i] = gram[i * rank + i];
        for (int64_t j = 0; j < rank; j++) change[i * rank + j] = i == j;
    }
    for (int64_t i = 0; i < rank; i++) {
        double square = gram[i * rank + i];
        int lost = square <= nothing * nothing * first[i]; /* not for NaN */
        double reach = sqrt(lost ? 1.0 : square);
        double factor = lost ? 0.0 : epsilon != 0.0 ? unit[i] / (unit[i] * reach + epsilon) : 1.0 / reach;
        for (int64_t j = 0; j < rank; j++) gram[i * rank + j] *= factor;
        for (int64_t j = 0; j < rank; j++) gram[j * rank + i] *= factor;
        for (int64_t j = 0; j < rank; j++) change[j * rank + i] *= factor;
        double one = 2.0 - gram[i * rank + i]; /* but for epsilon */
        for (int64_t j = 0; j < rank; j++)
            for (int64_t k = i + 1; k < rank; k++) {
                double along = gram[i * rank + k];
                change[j * rank + k] -= change[j * rank + i] * along;
                if (j > i) gram[j * rank + k] -= one * (gram[i * rank + j] * along);
            }
    }
    for (int64_t j = 0; j < rank; j++) {
        double *made = low; /* not needed any more */
        for (int64_t n = 0; n < length; n++) made[n] = change[j] * high[n];
        for (int64_t i = 1; i <= j; i++)
            for (int64_t n = 0; n < length; n++) made[n] += change[i * rank + j] * high[i * length + n];
        for (int64_t n = 0; n < length; n++) out[j * length + n] = (float)made[n];
    }
}

/* feedback._corrected: a gradient times this rank's share, plus what is left over. */
void weigh_and_add(const float *restrict x, float factor, const float *restrict y, int64_t count, float *restrict out)
{
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * factor + y[i];
}

/* runs.Runs: of each row (here, there, length) of the table, in elements of `size` bytes; `back`: from there to here. */
void move_runs(const uint8_t *restrict source, uint8_t *restrict target, const int64_t *restrict table, int64_t count,
               int64_t size, int32_t back)
{
    for (int64_t i = 0; i < count; i++, table += 3)
        memcpy(target + table[!back] * size, source + table[!!back] * size, table[2] * size);
}
