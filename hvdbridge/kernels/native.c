/* What the CPU kernels do, as loops that read memory once. native.py compiles, loads and describes this file.

   Every function gives the bits of the torch operations in whose place it runs: sums in the same order, no fused multiply-add (-ffp-contract=off), rounding half to even. In a block
   that is not finite, whose scale says so, codes may differ: any will do. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define TINY 0x1p-126f

static inline int32_t bits_of(float x) { int32_t i; memcpy(&i, &x, 4); return i; }
static inline float float_of(int32_t i) { float x; memcpy(&x, &i, 4); return x; }

/* A block (blocks.places): `count` elements from `start` of a vector, their codes from `code` of row `row` of the codes,
   their scale the `scale`-th of that row. A scale may have any address. Randomness calls the first element `number`. */
struct place { int64_t start; int32_t count, row, code, scale; uint32_t number; int32_t unused; };

/* blocks.Strip, blocks.places: strips whose parts alternate in the vector take turns, so that a coder reads the vector in
   its order. */
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

/* codes.norms. */
static inline float norm(const float *restrict x, int64_t count, int64_t width, float *restrict scratch)
{
    float top = largest(x, count), safe = top < TINY ? TINY : top, inverse = 1.0f / safe;
    for (int64_t i = 0; i < count; i++) {
        float y = x[i] * inverse;
        scratch[i] = y * y;
    }
    for (int64_t i = count; i < width; i++) scratch[i] = 0.0f;
    return sqrtf(sum_of(scratch, width)) * safe;
}

/* fused.InC, native.Job: what to encode or decode; 0 where Python says nothing. Rows are `..._stride` bytes apart. */
enum { LINEAR, TERNARY, SIGN, FLOAT8, POWER };
struct job {
    float *vector;
    const struct place *table;
    uint8_t *codes, *scales;
    int64_t blocks, width, rows, messages, length, code_stride, scale_stride;
    int32_t kind, bits, levels, offset, mask, l2, random, digits, bias, top, keep_rest, add;
    uint32_t low, high;
};

/* The noise of a block's i-th element: from 0 to below 1, exactly. */
static inline float rounding_offset(const struct job *job, const struct place *at, int64_t i)
{
    return (float)(int32_t)hashed(at->number + (uint32_t)i, job->low, job->high) * 0x1p-24f;
}

/* codes.Linear: by the largest magnitude or by the norm; to the nearest or at random. */
static inline float linear(const struct job *job, const struct place *at, const float *restrict x, uint8_t *restrict code,
                           float *restrict scratch)
{
    int32_t count = at->count, offset = job->offset, mask = job->mask;
    float scale = (job->l2 ? norm(x, count, job->width, scratch) : largest(x, count)) / (float)job->levels;
    scale = scale < TINY ? TINY : scale;
    float inverse = 1.0f / scale, last = (float)job->levels;
    if (job->random)
        for (int64_t i = 0; i < count; i++) {
            float y = floorf(x[i] * inverse + rounding_offset(job, at, i));
            y = y > last ? last : y < -last ? -last : y;
            code[i] = (uint8_t)(((int32_t)y + offset) & mask);
        }
    else
        for (int64_t i = 0; i < count; i++) code[i] = (uint8_t)(((int32_t)rintf(x[i] * inverse) + offset) & mask);
    return scale;
}

/* codes.Ternary: the scale and the limit of a block are given, side by side. */
static inline void ternary(const struct job *job, const struct place *at, const float *restrict x, uint8_t *restrict code)
{
    const uint8_t *given = job->scales + at->row * job->scale_stride + 8 * (int64_t)at->scale;
    float scale = float_at(given), limit = float_at(given + 4), inverse = 1.0f / (scale < TINY ? TINY : scale);
    limit = limit < TINY ? TINY : limit;
    for (int64_t i = 0; i < at->count; i++) {
        float y = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
        y = floorf(y * inverse + rounding_offset(job, at, i));
        code[i] = (uint8_t)(((int32_t)(y > 1.0f ? 1.0f : y < -1.0f ? -1.0f : y) + 1) & 3);
    }
}

/* signs.ScaledSign. */
static inline float sign(const struct job *job, const struct place *at, const float *restrict x, uint8_t *restrict code,
                         float *restrict scratch)
{
    for (int64_t i = 0; i < at->count; i++) scratch[i] = fabsf(x[i]);
    for (int64_t i = at->count; i < job->width; i++) scratch[i] = 0.0f;
    for (int64_t i = 0; i < at->count; i++) code[i] = x[i] >= 0.0f;
    return sum_of(scratch, job->width) / (float)at->count;
}

/* codes.Float8: 3 bits of fraction and a bias of 7 (e4m3), or 2 and 15 (e5m2). Nothing is above the largest number,
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

static inline float float8(const struct job *job, const struct place *at, const float *restrict x, uint8_t *restrict code,
                           float *restrict scratch)
{
    int32_t digits = job->digits, bias = job->bias;
    const float smallest = float_of((128 - bias) << 23), unit = float_of((127 - digits) << 23), top = (float)job->top;
    float scale = largest(x, at->count) / top;
    scale = scale < TINY ? TINY : scale;
    float inverse = 1.0f / scale;
    for (int64_t i = 0; i < at->count; i++) scratch[i] = x[i] * inverse;
    if (job->random)
        for (int64_t i = 0; i < at->count; i++) {
            float power = float_of(bits_of(scratch[i]) & 0x7f800000);
            float step = (power < smallest ? smallest : power) * unit;
            float y = floorf(scratch[i] / step + rounding_offset(job, at, i)) * step;
            scratch[i] = y > top ? top : y < -top ? -top : y;
        }
    for (int64_t i = 0; i < at->count; i++) code[i] = narrow(scratch[i], digits, bias);
    return scale;
}

/* codes.PowerOfTwo. */
static inline void power(const struct job *job, const struct place *at, const float *restrict x,
                         uint8_t *restrict exponent, uint8_t *restrict sign)
{
    for (int64_t i = 0; i < at->count; i++) {
        int32_t word = bits_of(x[i]), magnitude = word & 0x7fffffff;
        int32_t finite = magnitude < 0x7f800000, number = magnitude < 0x7f7fffff ? magnitude : 0x7f7fffff;
        int32_t carry = (int32_t)(hashed(at->number + (uint32_t)i, job->low, job->high) >> 1);
        int32_t raised = (number + carry) >> 23;
        exponent[i] = (uint8_t)(!finite ? 255 : raised < 254 ? raised : 254);
        sign[i] = word < 0;
    }
}

/* What the codes of a block stand for is written (`how` 0) to `out`, added to it (1), or subtracted (-1). */
#define EACH(VALUE) \
    do { \
        if (how == 0) for (int64_t i = 0; i < count; i++) out[i] = VALUE; \
        else if (how > 0) for (int64_t i = 0; i < count; i++) out[i] += VALUE; \
        else for (int64_t i = 0; i < count; i++) out[i] -= VALUE; \
    } while (0)

static inline void say(const struct job *job, const float *restrict value, const uint8_t *restrict code,
                       const uint8_t *restrict exponent, float scale, int how, int64_t count, float *restrict out)
{
    int32_t offset = job->offset;
    float twice = 2.0f * scale;
    switch (job->kind) {
    case LINEAR: case TERNARY:
        if (offset) EACH((float)(code[i] - offset) * scale);
        else EACH((float)(int8_t)code[i] * scale);
        break;
    case SIGN: EACH(((float)code[i] - 0.5f) * twice); break;
    case FLOAT8: EACH(value[code[i]] * scale); break;
    case POWER: EACH(float_of((int32_t)((uint32_t)exponent[i] << 23 | (uint32_t)code[i] << 31))); break;
    }
}

/* Codes have `bits` each in their rows, which hold zeros. A row of POWER has `length` exponents, a byte each, and behind
   them the signs, a bit each: these are its codes. `keep_rest`: the vector becomes what the codes do not say. */
void encode(const struct job *job)
{
    struct some some;
    float scratch[WIDTH], value[256];
    int32_t bits = job->kind == POWER ? 1 : job->bits;
    int64_t skip = job->kind == POWER ? job->length : 0;
    for (int i = 0; i < 256 && job->kind == FLOAT8; i++) value[i] = wide((uint8_t)i, job->digits, job->bias);
    for (const struct place *at = job->table; at < job->table + job->blocks; at++) {
        float *x = job->vector + at->start, scale = 0.0f;
        uint8_t *row = job->codes + at->row * job->code_stride, *exponent = row + at->code;
        uint8_t *code = codes_for(at, bits, row + skip, &some);
        switch (job->kind) {
        case LINEAR: scale = linear(job, at, x, code, scratch); break;
        case TERNARY: ternary(job, at, x, code); break;
        case SIGN: scale = sign(job, at, x, code, scratch); break;
        case FLOAT8: scale = float8(job, at, x, code, scratch); break;
        case POWER: power(job, at, x, exponent, code); break;
        }
        if (job->kind != TERNARY && job->kind != POWER)
            memcpy(job->scales + at->row * job->scale_stride + 4 * (int64_t)at->scale, &scale, 4);
        put_codes(at, bits, row + skip, &some);
        if (job->keep_rest) say(job, value, code, exponent, scale, -1, at->count, x);
    }
}

/* The inverse, of `messages` times `rows` rows: the vector becomes, or with `add` 1 or -1 changes by, what they say. */
void decode(const struct job *job)
{
    struct some some;
    float value[256];
    int32_t bits = job->kind == POWER ? 1 : job->bits;
    int64_t skip = job->kind == POWER ? job->length : 0;
    for (int i = 0; i < 256 && job->kind == FLOAT8; i++) value[i] = wide((uint8_t)i, job->digits, job->bias);
    for (const struct place *at = job->table; at < job->table + job->blocks; at++)
        for (int64_t message = 0; message < job->messages; message++) {
            int64_t number = message * job->rows + at->row;
            const uint8_t *row = job->codes + number * job->code_stride;
            const uint8_t *code = codes_of(at, bits, row + skip, &some);
            float scale = 0.0f;
            if (job->kind != POWER) scale = float_at(job->scales + number * job->scale_stride + 4 * (int64_t)at->scale);
            int how = job->add ? job->add : message > 0;
            say(job, value, code, row + at->code, scale, how, at->count, job->vector + at->start);
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

/* select.reaching: positions of what is not below the limit, ascending; their number, or -1: more than `capacity`. */
int64_t reaching(const int32_t *restrict bits, int64_t count, int32_t limit, int32_t mask, int64_t *restrict positions,
                 int64_t capacity)
{
    int64_t found = 0, i = 0;
    for (; i + 32 <= count; i += 32)
        for (uint32_t word = reached(bits + i, limit, mask); word; word &= word - 1) {
            if (found == capacity) return -1;
            positions[found++] = i + __builtin_ctz(word);
        }
    for (; i < count; i++)
        if ((bits[i] & mask) >= limit) {
            if (found == capacity) return -1;
            positions[found++] = i;
        }
    return found;
}

/* matrices.add_outer: a matrix [rows, cols] becomes, or with `take` is lessened by, p [rank, rows] transposed times q [rank,
   cols]: products rounded, then added in the order of the vectors. */
void outer(float *restrict matrix, int64_t rows, int64_t cols, const float *restrict p, const float *restrict q,
           int64_t rank, int32_t take)
{
    float made[WIDTH];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0; first < cols; first += WIDTH) {
            int64_t width = cols - first < WIDTH ? cols - first : WIDTH;
            float *x = matrix + r * cols + first;
            for (int64_t c = 0; c < width; c++) made[c] = p[r] * q[first + c];
            for (int64_t k = 1; k < rank; k++) {
                const float *row = q + k * cols + first;
                float factor = p[k * rows + r];
                for (int64_t c = 0; c < width; c++) made[c] += factor * row[c];
            }
            if (take) for (int64_t c = 0; c < width; c++) x[c] -= made[c];
            else memcpy(x, made, 4 * (size_t)width);
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
