/* The CPU's kernels: loops that read memory once. native.py compiles and loads this file, and declares its functions.

   Every function gives the bits of the torch operations that it replaces: sums in the same order, no fused multiply-add
   (-ffp-contract=off), rounding half to even. Only blocks that are not finite may get other codes: since their scale is
   not finite, any codes decode to non-finite numbers. */

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

/* A block (blocks.block_table): `count` elements at offset `start` of a vector. Their codes are at offset `code` of row
   `row`, and their scale is number `scale` of that row; its address may be unaligned. `number` is the first element's
   random-number index. */
struct block { int64_t start; int32_t count, row, code, scale; uint32_t number; int32_t unused; };

/* blocks.Strip, blocks.block_table. Blocks of strips that alternate in the vector are written in the vector's order, so
   that a coder reads it sequentially. */
struct strip { int64_t start, stride, count, size, row, code, scale, number, number_step; };

void fill_block_table(const struct strip *restrict strips, int64_t count, int64_t width, struct block *restrict out)
{
    const struct strip *end = strips + count;
    for (const struct strip *first = strips, *next; first < end; first = next) {
        next = first + 1;
        while (next < end && next->stride == first->stride && next->start == next[-1].start + next->size) next++;
        for (int64_t segment = 0, left = 1; left; segment++) {
            left = 0;
            for (const struct strip *strip = first; strip < next; strip++) {
                if (segment >= strip->count) continue;
                left |= segment + 1 < strip->count;
                int64_t start = strip->start + segment * strip->stride, code = strip->code + segment * strip->size;
                int64_t scale = strip->scale + segment * ((strip->size + width - 1) / width);
                int64_t number = strip->number + segment * strip->number_step;
                for (int64_t i = 0; i < strip->size; i += width) {
                    int64_t elements = strip->size - i < width ? strip->size - i : width;
                    *out++ = (struct block){start + i, (int32_t)elements, (int32_t)strip->row, (int32_t)(code + i),
                                            (int32_t)scale++, (uint32_t)(number + i), 0};
                }
            }
        }
    }
}

static inline float float_at(const uint8_t *address) { float x; memcpy(&x, address, 4); return x; }

/* pack._pack_words and pack._unpack_words: eight codes of one byte each, and as many bytes as a code has bits. */
static inline uint64_t load(const uint8_t *address) { uint64_t w; memcpy(&w, address, 8); return w; } /* unaligned */

static inline uint64_t bit_mask(int period, int width)
{
    uint64_t mask = 0;
    for (int shift = 0; shift < 64; shift += period) mask |= ((1ull << width) - 1) << shift;
    return mask;
}

#define DEFINE_PACKING(BITS) \
    static void pack_codes##BITS(const uint8_t *restrict words, int64_t count, uint8_t *restrict out) \
    { \
        const uint64_t low8 = bit_mask(16, BITS), low16 = bit_mask(32, 2 * BITS), low32 = bit_mask(64, 4 * BITS); \
        for (int64_t i = 0; i < count; i++) { \
            uint64_t w = load(words + 8 * i); \
            w = (w & low8) | (w >> (8 - BITS) & low8 << BITS); \
            w = (w & low16) | (w >> 2 * (8 - BITS) & low16 << 2 * BITS); \
            w = (w & low32) | (w >> 4 * (8 - BITS) & low32 << 4 * BITS); \
            memcpy(out + i * BITS, &w, BITS); \
        } \
    } \
    static void unpack_codes##BITS(const uint8_t *restrict packed, int64_t count, uint64_t *restrict words) \
    { \
        const uint64_t low8 = bit_mask(16, BITS), low16 = bit_mask(32, 2 * BITS), low32 = bit_mask(64, 4 * BITS); \
        for (int64_t i = 0; i < count; i++) { \
            uint64_t w = 0; \
            memcpy(&w, packed + i * BITS, BITS); \
            w = (w & low32) | (w & low32 << 4 * BITS) << 4 * (8 - BITS); \
            w = (w & low16) | (w & low16 << 2 * BITS) << 2 * (8 - BITS); \
            words[i] = (w & low8) | (w & low8 << BITS) << (8 - BITS); \
        } \
    }
DEFINE_PACKING(2) DEFINE_PACKING(3) DEFINE_PACKING(4) DEFINE_PACKING(5) DEFINE_PACKING(6) DEFINE_PACKING(7)

static void pack_codes1(const uint8_t *restrict words, int64_t count, uint8_t *restrict out)
{
    for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(load(words + 8 * i) * 0x0102040810204080ull >> 56);
}

static void unpack_codes1(const uint8_t *restrict packed, int64_t count, uint64_t *restrict words)
{
    for (int64_t i = 0; i < count; i++) { /* mask each byte's own bit, which then carries to the top */
        uint64_t w = packed[i] * 0x0101010101010101ull & 0x8040201008040201ull;
        words[i] = (w + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
    }
}

void pack_codes(const uint8_t *words, int64_t count, int32_t bits, uint8_t *out)
{
    static void (*const functions[])(const uint8_t *, int64_t, uint8_t *) = {
        0, pack_codes1, pack_codes2, pack_codes3, pack_codes4, pack_codes5, pack_codes6, pack_codes7};
    functions[bits](words, count, out);
}

void unpack_codes(const uint8_t *packed, int64_t count, int32_t bits, uint64_t *words)
{
    static void (*const functions[])(const uint8_t *, int64_t, uint64_t *) = {
        0, unpack_codes1, unpack_codes2, unpack_codes3, unpack_codes4, unpack_codes5, unpack_codes6, unpack_codes7};
    functions[bits](packed, count, words);
}

/* A row holds codes of `bits` bits. Eight codes of fewer than 8 bits form a group of `bits` bytes. A block may begin or
   end within a group, which it then shares with other blocks. */
enum { WIDTH = 1024 };
struct codes { uint64_t words[WIDTH / 8 + 2]; };

static inline int fills_groups(const struct block *b) { return b->code % 8 == 0 && b->count % 8 == 0; }
static inline int64_t group_count(const struct block *b) { return (b->code % 8 + b->count + 7) / 8; }
static inline int64_t size_of(const struct block *b, int32_t bits) { return ((b->code % 8 + b->count) * bits + 7) / 8; }

/* Return where to write a block's codes, a byte each. store_codes then packs them into the row, which holds zeros. */
static inline uint8_t *begin_codes(const struct block *b, int32_t bits, uint8_t *row, struct codes *buffer)
{
    if (bits == 8) return row + b->code;
    buffer->words[0] = buffer->words[group_count(b) - 1] = 0;
    return (uint8_t *)buffer->words + b->code % 8;
}

static inline void store_codes(const struct block *b, int32_t bits, uint8_t *row, const struct codes *buffer)
{
    if (bits == 8) return;
    uint8_t *out = row + b->code / 8 * bits, packed[WIDTH + 16];
    pack_codes((const uint8_t *)buffer->words, group_count(b), bits, fills_groups(b) ? out : packed);
    if (fills_groups(b)) return;
    for (int64_t i = 0; i < size_of(b, bits); i++) out[i] |= packed[i];
}

/* Return the codes of a block, a byte each. */
static inline const uint8_t *load_codes(const struct block *b, int32_t bits, const uint8_t *row, struct codes *buffer)
{
    if (bits == 8) return row + b->code;
    const uint8_t *from = row + b->code / 8 * bits;
    uint8_t packed[WIDTH + 16];
    if (!fills_groups(b)) from = memcpy(packed, from, (size_t)size_of(b, bits)); /* the row may end there */
    unpack_codes(from, group_count(b), bits, buffer->words);
    return (uint8_t *)buffer->words + b->code % 8;
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

/* The largest magnitude. As integers, NaN is above inf, and inf above all finite numbers. */
static inline float largest(const float *x, int64_t count)
{
    int32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        top = magnitude > top ? magnitude : top;
    }
    return float_of(top);
}

/* quantise.row_sums of `width` numbers, which are overwritten. The order of additions is that of a full block. */
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

/* native.Job: arguments of encode and decode; fields that Python does not set are 0. Strides of rows are in bytes. */
enum { LINEAR, TERNARY, SIGN, FLOAT8, POWER };
struct job {
    float *vector;
    const struct block *table;
    uint8_t *codes, *scales;
    int64_t blocks, width, rows, messages, length, code_stride, scale_stride;
    int32_t kind, bits, levels, offset, mask, l2, random, digits, bias, top, keep_rest, add;
    uint32_t low, high;
};

/* The noise of a block's i-th element, in [0, 1), exactly. */
static inline float rounding_offset(const struct job *job, const struct block *b, int64_t i)
{
    return (float)(int32_t)hashed(b->number + (uint32_t)i, job->low, job->high) * 0x1p-24f;
}

/* codes.Linear, by the largest magnitude or the norm, to the nearest or stochastic. Returns the scale. */
static inline float linear(const struct job *job, const struct block *b, const float *restrict x,
                           uint8_t *restrict code, float *restrict scratch)
{
    int32_t count = b->count, offset = job->offset, mask = job->mask;
    float scale = (job->l2 ? norm(x, count, job->width, scratch) : largest(x, count)) / (float)job->levels;
    scale = scale < TINY ? TINY : scale;
    float inverse = 1.0f / scale, last = (float)job->levels;
    if (job->random)
        for (int64_t i = 0; i < count; i++) {
            float y = floorf(x[i] * inverse + rounding_offset(job, b, i));
            y = y > last ? last : y < -last ? -last : y;
            code[i] = (uint8_t)(((int32_t)y + offset) & mask);
        }
    else
        for (int64_t i = 0; i < count; i++) code[i] = (uint8_t)(((int32_t)rintf(x[i] * inverse) + offset) & mask);
    return scale;
}

/* codes.Ternary: the caller gives each block's scale and limit, next to each other. */
static inline void ternary(const struct job *job, const struct block *b, const float *restrict x,
                           uint8_t *restrict code)
{
    const uint8_t *pair = job->scales + b->row * job->scale_stride + 8 * (int64_t)b->scale;
    float scale = float_at(pair), limit = float_at(pair + 4), inverse = 1.0f / (scale < TINY ? TINY : scale);
    limit = limit < TINY ? TINY : limit;
    for (int64_t i = 0; i < b->count; i++) {
        float y = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
        y = floorf(y * inverse + rounding_offset(job, b, i));
        code[i] = (uint8_t)(((int32_t)(y > 1.0f ? 1.0f : y < -1.0f ? -1.0f : y) + 1) & 3);
    }
}

/* signs.ScaledSign. Returns the scale. */
static inline float sign(const struct job *job, const struct block *b, const float *restrict x, uint8_t *restrict code,
                         float *restrict scratch)
{
    for (int64_t i = 0; i < b->count; i++) scratch[i] = fabsf(x[i]);
    for (int64_t i = b->count; i < job->width; i++) scratch[i] = 0.0f;
    for (int64_t i = 0; i < b->count; i++) code[i] = x[i] >= 0.0f;
    return sum_of(scratch, job->width) / (float)b->count;
}

/* codes.Float8: 3 bits of fraction and a bias of 7 (e4m3), or 2 and 15 (e5m2). No finite input exceeds the largest
   number. e4m3 has no inf, but blocks that are not finite have a scale that is not finite. */
static inline uint8_t to_float8(float y, int32_t digits, int32_t bias)
{
    int32_t bits = bits_of(y), magnitude = bits & 0x7fffffff, drop = 23 - digits, code;
    if (magnitude > 0x7f800000)
        code = 0x7f;
    else if (magnitude < (128 - bias) << 23)
        code = (int32_t)rintf(float_of(magnitude) * float_of((126 + bias + digits) << 23));
    else
        code = ((magnitude + (1 << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop) - ((127 - bias) << digits);
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

static inline float from_float8(uint8_t code, int32_t digits, int32_t bias)
{
    int32_t exponent = (code & 0x7f) >> digits, fraction = code & ((1 << digits) - 1);
    if (digits == 2 && exponent == 31) return fraction ? NAN : code & 0x80 ? -INFINITY : INFINITY;
    float magnitude = exponent ? float_of((exponent + 127 - bias) << 23 | fraction << (23 - digits))
                               : (float)fraction * float_of((128 - bias - digits) << 23);
    return code & 0x80 ? -magnitude : magnitude;
}

static inline float float8(const struct job *job, const struct block *b, const float *restrict x,
                           uint8_t *restrict code, float *restrict scratch)
{
    int32_t digits = job->digits, bias = job->bias;
    const float smallest = float_of((128 - bias) << 23), unit = float_of((127 - digits) << 23), top = (float)job->top;
    float scale = largest(x, b->count) / top;
    scale = scale < TINY ? TINY : scale;
    float inverse = 1.0f / scale;
    for (int64_t i = 0; i < b->count; i++) scratch[i] = x[i] * inverse;
    if (job->random)
        for (int64_t i = 0; i < b->count; i++) {
            float power = float_of(bits_of(scratch[i]) & 0x7f800000);
            float step = (power < smallest ? smallest : power) * unit;
            float y = floorf(scratch[i] / step + rounding_offset(job, b, i)) * step;
            scratch[i] = y > top ? top : y < -top ? -top : y;
        }
    for (int64_t i = 0; i < b->count; i++) code[i] = to_float8(scratch[i], digits, bias);
    return scale;
}

/* codes.PowerOfTwo. */
static inline void power(const struct job *job, const struct block *b, const float *restrict x,
                         uint8_t *restrict exponent, uint8_t *restrict sign)
{
    for (int64_t i = 0; i < b->count; i++) {
        int32_t word = bits_of(x[i]), magnitude = word & 0x7fffffff;
        int32_t finite = magnitude < 0x7f800000, number = magnitude < 0x7f7fffff ? magnitude : 0x7f7fffff;
        int32_t carry = (int32_t)(hashed(b->number + (uint32_t)i, job->low, job->high) >> 1);
        int32_t rounded = (number + carry) >> 23;
        exponent[i] = (uint8_t)(!finite ? 255 : rounded < 254 ? rounded : 254);
        sign[i] = word < 0;
    }
}

/* Write the decoded values of a block to `out` (`mode` 0), add them to it (1), or subtract them (-1). */
#define FOR_EACH(VALUE) \
    do { \
        if (mode == 0) for (int64_t i = 0; i < count; i++) out[i] = VALUE; \
        else if (mode > 0) for (int64_t i = 0; i < count; i++) out[i] += VALUE; \
        else for (int64_t i = 0; i < count; i++) out[i] -= VALUE; \
    } while (0)

static inline void add_values(const struct job *job, const float *restrict value, const uint8_t *restrict code,
                              const uint8_t *restrict exponent, float scale, int mode, int64_t count,
                              float *restrict out)
{
    int32_t offset = job->offset;
    float twice = 2.0f * scale;
    switch (job->kind) {
    case LINEAR: case TERNARY:
        if (offset) FOR_EACH((float)(code[i] - offset) * scale);
        else FOR_EACH((float)(int8_t)code[i] * scale);
        break;
    case SIGN: FOR_EACH(((float)code[i] - 0.5f) * twice); break;
    case FLOAT8: FOR_EACH(value[code[i]] * scale); break;
    case POWER: FOR_EACH(float_of((int32_t)((uint32_t)exponent[i] << 23 | (uint32_t)code[i] << 31))); break;
    }
}

/* Write codes of `bits` bits to rows that hold zeros. A row of POWER has `length` exponents, a byte each, and then the
   signs, a bit each, which are its codes. `keep_rest`: subtract the decoded values from the vector. */
void encode(const struct job *job)
{
    struct codes buffer;
    float scratch[WIDTH], value[256];
    int32_t bits = job->kind == POWER ? 1 : job->bits;
    int64_t skip = job->kind == POWER ? job->length : 0;
    for (int i = 0; i < 256 && job->kind == FLOAT8; i++) value[i] = from_float8((uint8_t)i, job->digits, job->bias);
    for (const struct block *b = job->table; b < job->table + job->blocks; b++) {
        float *x = job->vector + b->start, scale = 0.0f;
        uint8_t *row = job->codes + b->row * job->code_stride, *exponent = row + b->code;
        uint8_t *code = begin_codes(b, bits, row + skip, &buffer);
        switch (job->kind) {
        case LINEAR: scale = linear(job, b, x, code, scratch); break;
        case TERNARY: ternary(job, b, x, code); break;
        case SIGN: scale = sign(job, b, x, code, scratch); break;
        case FLOAT8: scale = float8(job, b, x, code, scratch); break;
        case POWER: power(job, b, x, exponent, code); break;
        }
        if (job->kind != TERNARY && job->kind != POWER)
            memcpy(job->scales + b->row * job->scale_stride + 4 * (int64_t)b->scale, &scale, 4);
        store_codes(b, bits, row + skip, &buffer);
        if (job->keep_rest) add_values(job, value, code, exponent, scale, -1, b->count, x);
    }
}

/* Decode `messages` times `rows` rows and write their sum to the vector, or add (`add` 1) or subtract it (-1). */
void decode(const struct job *job)
{
    struct codes buffer;
    float value[256];
    int32_t bits = job->kind == POWER ? 1 : job->bits;
    int64_t skip = job->kind == POWER ? job->length : 0;
    for (int i = 0; i < 256 && job->kind == FLOAT8; i++) value[i] = from_float8((uint8_t)i, job->digits, job->bias);
    for (const struct block *b = job->table; b < job->table + job->blocks; b++)
        for (int64_t message = 0; message < job->messages; message++) {
            int64_t number = message * job->rows + b->row;
            const uint8_t *row = job->codes + number * job->code_stride;
            const uint8_t *code = load_codes(b, bits, row + skip, &buffer);
            float scale = 0.0f;
            if (job->kind != POWER) scale = float_at(job->scales + number * job->scale_stride + 4 * (int64_t)b->scale);
            int mode = job->add ? job->add : message > 0;
            add_values(job, value, code, row + b->code, scale, mode, b->count, job->vector + b->start);
        }
}

/* A bit for each of 32 numbers, set if the magnitude reaches the limit. Compilers do not vectorize the plain loop. */
static inline uint32_t reached_bits(const int32_t *bits, int32_t limit, int32_t mask)
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

/* select.threshold_positions: positions of elements that reach the limit, ascending. Returns their number, or -1 if it
   exceeds `capacity`. */
int64_t threshold_positions(const int32_t *restrict bits, int64_t count, int32_t limit, int32_t mask,
                            int64_t *restrict positions, int64_t capacity)
{
    int64_t found = 0, i = 0;
    for (; i + 32 <= count; i += 32)
        for (uint32_t word = reached_bits(bits + i, limit, mask); word; word &= word - 1) {
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

/* matrices.add_outer: write p [rank, rows] transposed times q [rank, cols] to a matrix [rows, cols], or subtract it.
   Products are rounded, then added in the order of the vectors. */
void outer(float *restrict matrix, int64_t rows, int64_t cols, const float *restrict p, const float *restrict q,
           int64_t rank, int32_t subtract)
{
    float product[WIDTH];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0; first < cols; first += WIDTH) {
            int64_t width = cols - first < WIDTH ? cols - first : WIDTH;
            float *x = matrix + r * cols + first;
            for (int64_t c = 0; c < width; c++) product[c] = p[r] * q[first + c];
            for (int64_t k = 1; k < rank; k++) {
                const float *row = q + k * cols + first;
                float factor = p[k * rows + r];
                for (int64_t c = 0; c < width; c++) product[c] += factor * row[c];
            }
            if (subtract) for (int64_t c = 0; c < width; c++) x[c] -= product[c];
            else memcpy(x, product, 4 * (size_t)width);
        }
}

/* feedback._corrected: a gradient times this rank's share, plus the residual. */
void weigh_and_add(const float *restrict x, float factor, const float *restrict y, int64_t count, float *restrict out)
{
    for (int64_t i = 0; i < count; i++) out[i] = x[i] * factor + y[i];
}

/* runs.Runs: copy each run (first, second, length) of elements of `size` bytes. `back`: from second to first. */
void copy_runs(const uint8_t *restrict source, uint8_t *restrict target, const int64_t *restrict table, int64_t count,
               int64_t size, int32_t back)
{
    for (int64_t i = 0; i < count; i++, table += 3)
        memcpy(target + table[!back] * size, source + table[!!back] * size, table[2] * size);
}
