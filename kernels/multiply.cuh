// Products with few tokens (decode): dst (n_tokens, rows) = x (n_tokens, cols) times weights
// (rows, cols) transposed. This file has the product itself. product.cu and product_qkv.cu include
// it, and give an "end": the ops on a result before it is stored.
//
// Compiled for each use (workbench/backend/cuda/kernels/matvec.py chooses):
//   TYPE_0 TYPE_1 TYPE_2   weight types of the segments, all for one kind of activations
//   N                      tokens of a block: 1, 2, 4 or 8. Tokens past n_tokens repeat the last
//   ROWS                   weight rows ("lines") of a warp; ROWS * N is at most 32
//   UNROLL                 units of each line that a lane has in flight
//   ROW_WARPS              warps that share a line's columns
//   WARPS                  warps of a block
//   PASSES                 how often a warp takes ROWS lines
//   BLOCKS                 blocks that must fit a multiprocessor
//   AHEAD                  KB after the first loads that a block requests into L2 before pdl_wait
//   SCALED                 results are scaled by the norm of x's rows, as by rms_scale
//   NARROW                 float weights whose cols are no multiple of 8: one weight at a time
//
// A lane reads units of 8 (float), 16 (Q8_0) or 32 weights with 16-byte loads. Its neighbours read
// the next units. All loads of the first round are requested before pdl_wait. From then on, for
// each unit: the lane unpacks it, requests the unit a round later into the same registers, and
// multiplies. So ROWS * UNROLL - 1 loads are always in flight. The bytes in flight limit these
// kernels: memory needs about 16 KB per multiprocessor.
//
// Activations come through L1 and serve all lines of a warp. Float weights are multiplied in float.
// Quantised weights are multiplied in integers (dp4a), exact up to the scales.
//
// ROWS, UNROLL, WARPS, PASSES and N do not change the order in which an element is summed. Lane l
// of warp s of ROW_WARPS takes units 32 s + l, 32 (s + ROW_WARPS) + l, ..; then a butterfly adds
// the lanes (16, 8, ..), and the warps are added in order. All rounding is fixed. So with equal
// ROW_WARPS a token's result is the same in every batch, and the same fused and unfused.
//
// Versions (one H100 80GB HBM3, one token).
//
// % of the read bandwidth, launched programmatically. data/results/tuning/product-*.csv has all
// types and shapes:
//                                                28672 x 4096   4096 x 4096
//   ROWS UNROLL WARPS BLOCKS ROW_WARPS           Q8_0   Q4_0    Q8_0   Q4_0
//   1    4      8     3      1                     99     91      74     57   one line a warp
//   2    2      8     3      1                     99     92      74     56   two lines a warp
//   2    4      4     4      2                    103      -      75      -   two warps a line
//   4    2      8     2      1                     99     94      84     67   fewer blocks, which
//                                                                             all run at once
//   4    2      8     2      2                     97     95      92     80   both: best for small
//                                                                             weights (256 blocks)
//
// % of the read bandwidth, gate and up:                            MXFP4   Q5_K   Q4_0
//   several blocks a multiprocessor                                   75     79     83
//   one block of 16 warps a multiprocessor                            84     83     86: kept
//   blocks of 14 warps for 14336 lines: all 256 run at once; figures in cuda/kernels/tuning.py
//
// us of a token of an 8B model, Q4_0:              0 KB   4 KB   8 KB   16 KB   32 KB
//   AHEAD                                          2050   2038   2038    2030    2044
//
// Counted in instructions, not timed:
//   Q8_0 units of 16 weights, not 32   two loads at a stride of 32 would request each sector twice
//   K types: a unit is one sub-block   one scale to decode for a load, not two
//   sums scattered while reduced       C values take C - 1 shuffles and one a step, not 5 C
#pragma once
#include "rms.cuh"
#include "tensor_core.cuh"
#include "units.cuh"

#ifndef TYPE_0  // a compilation without macros
#define TYPE_0 Q4_0
#endif
#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
#ifndef TYPE_2
#define TYPE_2 TYPE_0
#endif
#ifndef N
#define N 1
#endif
#ifndef ROWS
#define ROWS 4
#define UNROLL 2
#define WARPS 8
#define ROW_WARPS 1
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef PASSES
#define PASSES 1
#endif
#ifndef AHEAD
#define AHEAD 0
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int PASS = WARPS / ROW_WARPS * ROWS;  // lines of a pass
constexpr int LINES = PASS * PASSES;            // lines of a block
constexpr int STEP = 32 * ROW_WARPS, ROUND = STEP * UNROLL;  // units
static_assert(WARPS % ROW_WARPS == 0 && PASS % 2 == 0 && ROWS * N <= 32, "no such tuning");
#define LIMITS __launch_bounds__(THREADS, BLOCKS)

template <class A, class B>
struct Same {
    static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
    static constexpr bool value = true;
};

// the product -------------------------------------------------------------------------------------

// LineSums each of C values (a power of two) over the lanes; lane l returns value l / (32 / C).
template <int C>
DEVICE float scatter_sum(float (&v)[C]) {
#pragma unroll
    for (int k = 0; k < 5; k++) {
        const int o = 16 >> k, n = C >> (k + 1);
        const bool upper = threadIdx.x & o;
        if (n == 0) v[0] = __fadd_rn(v[0], __shfl_xor_sync(~0u, v[0], o));
#pragma unroll
        for (int i = 0; i < C / 2; i++) {
            if (i >= n) continue;
            const float mine = upper ? v[i + n] : v[i], other = upper ? v[i] : v[i + n];
            v[i] = __fadd_rn(mine, __shfl_xor_sync(~0u, other, o));
        }
    }
    return v[0];
}

// The results of a block: in shared memory the sums of each of ROW_WARPS warps, and the scale of
// each token.
struct LineSums {
    const float *part, *scale;
    DEVICE float operator()(int line, int t) const {
        float v = part[line * N + t];
#pragma unroll
        for (int s = 1; s < ROW_WARPS; s++) v = __fadd_rn(v, part[s * LINES * N + line * N + t]);
#ifdef SCALED
        v = __fmul_rn(v, scale[t]);
#endif
        return v;
    }
};

// The activations: x (n_tokens, cols). With SCALED x is a norm without its scale; `squares` are the
// sums of squares of the rows before the norm.
struct Given {
    const u8* x;
    i64 cols;
    int n_tokens;
    const float* squares;
    float eps;
};

#ifdef SCALED
// Copies the sums of squares to shared memory during the product, and then makes scales of them.
struct Scales {
    float* squares;
    float* scale;
    DEVICE void request(const Given& given) const {
        const int words = (given.n_tokens * (int(given.cols) / SQUARES) + 3) / 4;
        for (int i = threadIdx.x; i < words; i += THREADS)
            copy16(squares + 4 * i, given.squares + 4 * i, true);
        copies_group();
    }
    DEVICE void make(const Given& given) const {  // after all copies of the block have arrived
        const int n = int(given.cols) / SQUARES;
        for (int t = threadIdx.x / 32; t < given.n_tokens; t += WARPS) {
            const float s = rms_scale_of(squares + t * n, n, given.cols, given.eps);
            if (threadIdx.x % 32 == 0) scale[t] = s;
        }
        __syncthreads();
    }
};
#endif

// Requests the first AHEAD KB of the block's lines into L2, without the bytes of the first loads.
// The bytes arrive while earlier kernels still run. The lines of earlier passes come first; the
// lines of one pass get equal parts.
template <class W, class End>
DEVICE void request_ahead(const End& end, int first, i64 cols) {
#if __CUDA_ARCH__ >= 900
    using U = Units<W>;
    const int lane = threadIdx.x % 32, share = threadIdx.x / 32 % ROW_WARPS;
    if (AHEAD == 0 || share != 0 || lane >= ROWS * PASSES) return;
    const int units = int(cols / U::width), line = units * U::bytes;
    const int rest = max(0, line - ROUND * U::bytes), pass = lane / ROWS;
    const int before = pass == 0 ? 0 : ROWS * (rest + (pass - 1) * line);
    const int left = (AHEAD * 1024 / (WARPS / ROW_WARPS) - before) / ROWS / 128 * 128;
    const int bytes = min(pass == 0 ? rest : line, left) / 16 * 16;
    if (bytes <= 0) return;
    const int own = first + lane % ROWS;
    const i64 row = end.row(pass * PASS + own), skipped = pass == 0 ? ROUND : 0;
    const u8* from = U::quants(U::planes(end.weight(own), end.rows, cols));
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     from + (row * units + skipped) * U::bytes),
                 "r"(bytes));
#endif
}

// Multiplies the LINES lines of the block with N tokens. `end` gives the lines and takes the
// results:
//   weight(line), row(line)   the weight and its row of a line; `rows`: rows of the weight
//   before(), after()         called before and after pdl_wait
//   store(sums)               stores the results
template <class W, class End>
DEVICE void multiply_lines(End& end, const Given& given) {
    using U = Units<W>;
    __shared__ float part[ROW_WARPS * LINES * N], scale[N];
#ifdef SCALED
    __shared__ __align__(16) float squares[N * MOST_SQUARES];
    const Scales scales = {squares, scale};
#endif
    const i64 cols = given.cols;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = warp / ROW_WARPS * ROWS, share = warp % ROW_WARPS;
    const int units = int(cols / U::width), mine = share * 32 + lane;

    typename U::Planes planes[ROWS];
    int at[ROWS];  // the next unit of each line, counted in the whole weight
    const auto start = [&](int pass, int r) {
        return int(end.row(pass * PASS + first + r)) * units + mine;
    };
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        planes[r] = U::planes(end.weight(first + r), end.rows, cols);
        at[r] = start(0, r);
    }
    typename U::Raw raw[UNROLL][ROWS];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        if (mine + i * STEP < units) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) raw[i][r] = U::fetch(planes[r], at[r], i * STEP);
        }
    }
    request_ahead<W>(end, first, cols);
    end.before();
    pdl_wait();
#ifdef SCALED
    scales.request(given);
#endif
    end.after();

    const typename U::ActPlanes x_planes = U::act_planes(given.x, cols);
    int token[N];  // of each token: bytes after the first token
#pragma unroll
    for (int t = 0; t < N; t++) token[t] = min(t, given.n_tokens - 1) * int(x_row_bytes<W>(cols));
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const bool more = pass + 1 < PASSES;
        int next[ROWS];  // the first unit of each line of the next pass
#pragma unroll
        for (int r = 0; r < ROWS; r++) next[r] = more ? start(pass + 1, r) : 0;
        float acc[ROWS * N] = {};
        int u = mine;
        // Multiplies unit u + v of each line, which is in raw[i]. Before that it requests the next
        // unit for raw[i]: the unit a round later, if that is `known` to exist. In the `last` full
        // round that unit may be missing; raw[i] then gets the first unit of the next pass.
        const auto unit = [&](int i, bool known, bool last) {
            const int v = i * STEP;
            const bool here = known || (last && u + v + ROUND < units);
            const auto refill = [&](int r) {
                if (known) raw[i][r] = U::fetch(planes[r], at[r], v + ROUND);
                else if (here || more)
                    raw[i][r] = U::fetch(planes[r], here ? at[r] + ROUND : next[r], v);
            };
            typename U::Ints w[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) w[r] = U::expand(raw[i][r], lane);
#pragma unroll
            for (int r = 0; r < ROWS; r++) refill(r);
#pragma unroll
            for (int t = 0; t < N; t++) {
                const auto a = U::acts(x_planes, token[t], u, v);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    acc[r * N + t] = U::add(w[r], a, acc[r * N + t]);
            }
        };
        // `asm` hides the numbers from the compiler. Otherwise it would keep an address of 64 bits
        // for each plane of each row.
        const auto advance = [&] {
            u += ROUND;
            asm("" : "+r"(u));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                at[r] += ROUND;
                asm("" : "+r"(at[r]));
            }
        };
        // Three parts: the rounds after which another full round follows, the last full round, and
        // the rest. The loop has no condition. Otherwise the compiler would merge old and new
        // values of `raw` by copies, and each copy would wait for its load.
        int left = units;
        for (; left >= 2 * ROUND; left -= ROUND) {
#pragma unroll
            for (int i = 0; i < UNROLL; i++) unit(i, true, false);
            advance();
        }
        if (left >= ROUND) {
#pragma unroll
            for (int i = 0; i < UNROLL; i++) unit(i, false, true);
            advance();
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (u + i * STEP < units) unit(i, false, false);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) at[r] = next[r];

        constexpr int C = ROWS * N, LANES = 32 / C;
        const float sum = scatter_sum(acc);
        const int line = (share * PASSES + pass) * PASS + first;
        if (lane % LANES == 0) part[line * N + lane / LANES] = sum;
    }
#ifdef SCALED
    copies_wait<0>();
#endif
    __syncthreads();
#ifdef SCALED
    scales.make(given);
#endif
    end.store(LineSums{part, scale});
}

// segments ----------------------------------------------------------------------------------------

struct Segment {
    u8* dst;
    const u8* w;
    const float* bias;
    i64 rows;
    DEVICE float biased(float v, i64 row) const {
        return bias ? __fadd_rn(v, __ldg(bias + row)) : v;
    }
};

// The number of this block's segment. *found: the segment; *first: the block's first line there. A
// block has lines of one segment only.
DEVICE int find(const Segment (&all)[3], Segment* found, int* first) {
    int block = blockIdx.x, s = 0;
    for (; s < 2; s++) {
        const int blocks = int((all[s].rows + LINES - 1) / LINES);
        if (block < blocks) break;
        block -= blocks;
    }
    *found = s == 0 ? all[0] : s == 1 ? all[1] : all[2];
    *first = block * LINES;
    return s;
}

// Multiplies with the weight type of segment s. Segments of one type share their code.
template <class End>
DEVICE void multiply_segment(int s, End& end, const Given& given) {
    constexpr bool one = Same<TYPE_0, TYPE_1>::value, two = Same<TYPE_0, TYPE_2>::value;
    constexpr bool last = Same<TYPE_1, TYPE_2>::value;
    if (s == 0 || (s == 1 && one) || (s == 2 && two)) {
        multiply_lines<TYPE_0>(end, given);
    } else if (s == 1 || last) {
        if constexpr (!one) multiply_lines<TYPE_1>(end, given);
    } else {
        if constexpr (!two && !last) multiply_lines<TYPE_2>(end, given);
    }
}

#define SEGMENT(I) u8 *dst_##I, const u8 *w_##I, const float *bias_##I, i64 rows_##I
#define SEGMENTS {{dst_0, w_0, bias_0, rows_0}, {dst_1, w_1, bias_1, rows_1}, \
                  {dst_2, w_2, bias_2, rows_2}}
#define GIVEN_ARGUMENTS const u8 *x, i64 cols, i64 n_tokens, const float *squares, float eps
#define GIVEN Given{x, cols, int(n_tokens), squares, eps}
