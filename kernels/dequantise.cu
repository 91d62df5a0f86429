// Conversions before products on tensor cores: weights to halves for cuBLAS, activations to 16 bits
// for cuBLAS and tensor_product.cu.
//
//   dequantise_<TYPE>  rows first .. first + n - 1 of a weight as F16 (n, cols rounded up to 128),
//                      in the column order of halves.cuh. A thread has units of 32 weights: for
//                      each one 16-byte load (Q8_0: two) and four 16-byte stores. Four neighbouring
//                      lanes store 64 neighbouring bytes.
//   half_rows_F32      activations F32 (rows, cols) to F16 in the same order, saturating
//   half_rows_Q8       Q8_ACT rows to F16 in the same order
//   half_tiles_F32     activations F32 (rows, cols) to F16 in the tiles of tensor_product.cu
//   half_tiles_Q8      Q8_ACT rows to F16 in these tiles
//   half_rows          F32 to F16 in the usual order, saturating
//   bfloat_rows        F32 to BF16 in the usual order
//   add_bias           dst (rows, cols) += bias (cols)
//
// A tile has `tile` tokens. Rows are padded to 512 columns. The tile has a matrix for each 64
// columns: `tile` rows of 128 bytes. The 16-byte word c of row n lies at c ^ (n % 8), because
// Hopper's tensor cores read that layout from shared memory. A stage of tensor_product.cu is some
// neighbouring matrices, and so one copy.
//
// Versions (all weights of an 8B model, Q4_0; one H100 80GB HBM3):
//   a unit a thread, a block or two for each row   8.9 ms: half of the threads had no unit
//   units of all rows one after another            as long as reading and writing take: kept
//
// No pointer to activations is __restrict__. Otherwise the compiler could take the data for
// constant, and move a load above pdl_wait.
#include "halves.cuh"

// Arguments: dst, w, first, n, rows (of the weight), cols. Block 256; grid (ceil(n * units of a
// padded row / (256 * IN_FLIGHT)), 1). Threads take the units of all rows one after another,
// IN_FLIGHT at a time. So no thread is idle where a row is no multiple of 256 units.
constexpr int IN_FLIGHT = 2;

template <class W>
DEVICE void dequantise(u8* dst, const u8* w, i64 first, i64 n, i64 rows, i64 cols) {
    pdl_trigger();
    const u32 units = u32(cols / 32), padded = (units + 3) / 4 * 4, all = u32(n) * padded;
    const u32 at = blockIdx.x * (256 * IN_FLIGHT) + threadIdx.x;
    decltype(W::load(w, 0, 0)) raw[IN_FLIGHT];
    u32 u[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++) {
        const u32 i = min(at + k * 256, all - 1), row = i / padded;
        u[k] = i - row * padded;
        raw[k] = W::load(w, rows * cols / W::block, (first + row) * units + min(u[k], units - 1));
    }
    pdl_wait();
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++) {
        const u32 i = at + k * 256;
        if (i >= all) return;
        const u32 number = min(u[k], units - 1) % 8;
        const auto by = Halves<W>::factors(raw[k], number);
        const bool pad = u[k] >= units;
        u8* out = dst + i64(i / 4) * 256 + i % 4 * 16;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 h[4];
            Halves<W>::pairs(raw[k], number, by, j, h);
            *reinterpret_cast<uint4*>(out + 64 * j) =
                pad ? make_uint4(0, 0, 0, 0) : make_uint4(h[0], h[1], h[2], h[3]);
        }
    }
}

#define DEQUANTISE(TYPE)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) dequantise_##TYPE(                        \
        u8* dst, const u8* w, i64 first, i64 n, i64 rows, i64 cols) {                           \
        dequantise<TYPE>(dst, w, first, n, rows, cols);                                         \
    }
DEQUANTISE(Q8_0)
DEQUANTISE(Q4_0)
DEQUANTISE(MXFP4)
DEQUANTISE(Q4_K)
DEQUANTISE(Q5_K)
DEQUANTISE(Q6_K)

// activations ------------------------------------------------------------------------------------

// Four neighbouring columns column + i .. column + i + 3 of a row of activations, as floats.
// `column` and `i` are multiples of 4, and all four columns lie in the unit of 32 of `column`.
struct FloatColumns {
    const float* x;
    DEVICE FloatColumns(const u8* rows, i64 row, i64 cols, int column)
        : x(reinterpret_cast<const float*>(rows) + row * cols + column) {}
    DEVICE float4 four(int i) const { return *reinterpret_cast<const float4*>(x + i); }
};
struct Q8Columns {
    const u8* q;
    float scale;
    DEVICE Q8Columns(const u8* rows, i64 row, i64 cols, int column) {
        const u8* x = rows + row * act_row_bytes(cols);
        q = x + column;
        scale = reinterpret_cast<const float*>(x + cols)[column / 32];
    }
    DEVICE float4 four(int i) const {
        const char4 v = *reinterpret_cast<const char4*>(q + i);
        return make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
    }
};

// A thread makes 16-byte word c of a row: four columns from `at` on, and four from at + 16 on.
template <class Columns>
DEVICE void half_rows_of(u8* dst, const u8* x, i64 cols) {
    pdl_trigger();
    pdl_wait();
    const int c = blockIdx.y * 256 + threadIdx.x, words = int((cols + 127) / 128) * 16;
    if (c >= words) return;
    const int at = c / 16 * 128 + c % 4 * 32 + c % 16 / 4 * 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (at < cols) {
        const Columns columns(x, blockIdx.x, cols, at);
        const float4 lo = columns.four(0), hi = columns.four(16);
        v = make_uint4(halves(lo.x, lo.z), halves(lo.y, lo.w), halves(hi.x, hi.z),
                       halves(hi.y, hi.w));
    }
    reinterpret_cast<uint4*>(dst)[i64(blockIdx.x) * words + c] = v;
}

// Thread c of a token's row has four neighbouring columns of each of four units, unit u from column
// first + 32 u on. In the tile they are two words of a swizzled matrix, at bytes `to` and to ^ 16.
template <class Columns>
DEVICE void half_tiles_of(u8* dst, const u8* x, i64 cols, i64 n_tokens, int tile) {
    pdl_trigger();
    pdl_wait();
    const int c = blockIdx.y * 256 + threadIdx.x, steps = int((cols + 511) / 512) * 4;
    if (c >= steps * 8) return;
    const int token = blockIdx.x, first = c / 8 * 128 + c % 8 / 2 * 4 + c % 2 * 16;
    u32 even[4], odd[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
        const int at = first + 32 * u;
        float4 v = make_float4(0, 0, 0, 0);
        if (blockIdx.x < n_tokens && at < cols) v = Columns(x, blockIdx.x, cols, at).four(0);
        even[u] = halves(v.x, v.z), odd[u] = halves(v.y, v.w);
    }
    const int matrix = token / tile * steps * 2 + c / 4, n = token % tile;
    const int word = c / 2 % 2 * 4 + c % 2 * 2;
    const i64 to = (i64(matrix) * tile + n) * 128 + (word ^ n % 8) * 16;
    *reinterpret_cast<uint4*>(dst + to) = make_uint4(even[0], even[1], even[2], even[3]);
    *reinterpret_cast<uint4*>(dst + (to ^ 16)) = make_uint4(odd[0], odd[1], odd[2], odd[3]);
}

// Arguments of half_rows_*: dst, x, cols (a multiple of 32). Block 256; grid (rows, ceil(padded
// cols / 2048)).
// Arguments of half_tiles_*: dst, x, cols (a multiple of 32), n_tokens, tile (tokens of a tile, a
// multiple of 8). Block 256; grid (n_tokens rounded up to tiles, ceil(cols / 512 * 32 / 256)).
// Tokens past the last and columns past the row, up to a multiple of 512, are zeros.
#define ACTIVATIONS(TYPE, COLUMNS)                                                               \
    extern "C" __global__ void __launch_bounds__(256) half_rows_##TYPE(                          \
        u8* dst, const u8* x, i64 cols) {                                                        \
        half_rows_of<COLUMNS>(dst, x, cols);                                                     \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) half_tiles_##TYPE(                         \
        u8* dst, const u8* x, i64 cols, i64 n_tokens, i64 tile) {                                \
        half_tiles_of<COLUMNS>(dst, x, cols, n_tokens, int(tile));                               \
    }
ACTIVATIONS(F32, FloatColumns)
ACTIVATIONS(Q8, Q8Columns)

DEVICE u16 to_half(float f) { return float_to_half(within_half(f)); }
DEVICE u16 to_bfloat(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// Arguments of both: dst, x, n (elements). Block 256; grid (ceil(n / 1024), 1): 4 elements a
// thread.
#define CONVERT(NAME, TO)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) NAME(u16* dst, const float* x, i64 n) {    \
        pdl_trigger();                                                                           \
        pdl_wait();                                                                              \
        const i64 i = (i64(blockIdx.x) * 256 + threadIdx.x) * 4;                                 \
        if (i + 4 <= n) {                                                                        \
            const float4 v = *reinterpret_cast<const float4*>(x + i);                            \
            *reinterpret_cast<ushort4*>(dst + i) =                                               \
                make_ushort4(TO(v.x), TO(v.y), TO(v.z), TO(v.w));                                \
        } else {                                                                                 \
            for (i64 k = i; k < n; k++) dst[k] = TO(x[k]);                                       \
        }                                                                                        \
    }
CONVERT(half_rows, to_half)
CONVERT(bfloat_rows, to_bfloat)

// Arguments: dst, bias, cols, stride (elements from one row to the next). Block 256; grid (rows,
// ceil(cols / 256)).
extern "C" __global__ void __launch_bounds__(256) add_bias(float* dst, const float* bias, i64 cols,
                                                           i64 stride) {
    pdl_trigger();
    const i64 c = i64(blockIdx.y) * 256 + threadIdx.x;
    const float b = c < cols ? __ldg(bias + c) : 0;
    pdl_wait();
    if (c < cols) dst[blockIdx.x * stride + c] += b;
}
