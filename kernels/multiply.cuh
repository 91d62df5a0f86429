// Products with a few tokens (decode): dst (n_tokens, rows) = x (n_tokens, cols) times weights
// (rows, cols) transposed. This is the product. What follows before a result is stored is the "end"
// of the kernels that include this file: product.cu and product_qkv.cu.
//
// Compiled for each use (workbench/backend/cuda/kernels/matvec.py chooses):
//   TYPE_0 TYPE_1 TYPE_2   weight types of the segments, all for one kind of activations
//   N                      tokens of the block: 1, 2, 4 or 8; those past n_tokens repeat the last
//   ROWS                   weight rows ("lines") of a warp, ROWS * N at most 32
//   UNROLL                 units of each line in flight per lane
//   ROW_WARPS, WARPS       warps that share a line's columns; warps of a block
//   PASSES                 times that a warp takes ROWS lines, one after the other
//   BLOCKS                 blocks that must fit a multiprocessor
//   AHEAD                  KB that a block asks into L2 before the wait, behind its first loads
//   SCALED                 results are scaled by the norm of x's rows, as rms_scale does it
//   NARROW                 float weights whose cols are no multiple of 8: one weight at a time
//
// A lane reads units of 8 (float), 16 (Q8_0) or 32 weights with 16-byte loads; its neighbours read
// the next ones. All loads of the first round are requested before the wait for the kernels before.
// From then on a unit is unpacked, its registers are refilled with the unit a round later, and then
// it is multiplied: ROWS * UNROLL loads less one are always in flight. What limits these kernels is
// how many bytes are in flight: memory needs about 16 KB per multiprocessor.
//
// Activations come through L1 and serve all lines of a warp. Float weights are multiplied in float,
// quantised ones in integers (dp4a), exact up to the scales.
//
// An element is summed in one order, whatever ROWS, UNROLL, WARPS, PASSES and N are. Lane l of warp
// s of ROW_WARPS takes units 32 s + l, 32 (s + ROW_WARPS) + l, ..; then come the butterfly over
// lanes (16, 8, ..) and the warps in order. All rounding is pinned: with one ROW_WARPS a token's
// result is the same in every batch, and fused as unfused.
//
// Versions (% of read bandwidth, one H100 80GB HBM3, launched programmatically, one token; by ROWS,
// UNROLL, WARPS, BLOCKS, ROW_WARPS; Q8_0, Q4_0 of 28672 x 4096, then of 4096 x 4096;
// data/results/tuning/product-*.csv has all types and shapes):
//   1 4 8 3 1   99 91   74 57     each lane alone
//   2 2 8 3 1   99 92   74 56     large weights hardly care
//   2 4 4 4 2   103 -   75 -      two warps a line
//   4 2 8 2 1   99 94   84 67     more lines a warp: fewer blocks, all of them at once
//   4 2 8 2 2   97 95   92 80     both: best for small weights, whose 256 blocks run together
//   AHEAD of 0, 4, 8, 16, 32 KB          us of a token of 8B Q4_0: 2050, 2038, 2038, 2030, 2044
//   one block of 16 warps, gate and up   MXFP4 84 for 75, Q5_K 83 for 79, Q4_0 86 for 83
//   blocks of 14 warps for 14336 lines   all 256 run at once: figures in cuda/tuning.py
// Counted by instructions, not timed:
//   Q8_0 units of 16 weights, not 32     two loads at a stride of 32 ask for each sector twice
//   K types: a unit is one sub-block     one scale decoded per load, not two
//   sums scattered while reduced         C values take C - 1 shuffles and one per step, not 5 C
#pragma once
#include "rms.cuh"
#include "tensor_core.cuh"
#include "units.cuh"

#ifndef TYPE_0  // what the file is compiled with where nothing is chosen
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

// Sums each of C values (a power of two) over the lanes; lane l returns value l / (32 / C).
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

// The sums of a block, of each of ROW_WARPS warps, and the scale of each token, in shared memory.
struct Sums {
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

// What is multiplied: x (n_tokens, cols). With SCALED x is a norm without its scale, and these are
// the sums of squares of the rows that were normed.
struct Given {
    const u8* x;
    i64 cols;
    int n_tokens;
    const float* squares;
    float eps;
};

#ifdef SCALED
// The sums of squares come to shared memory while the product is made; then they become scales.
struct Scales {
    float* squares;
    float* scale;
    DEVICE void request(const Given& given) const {
        const int words = (given.n_tokens * (int(given.cols) / SQUARES) + 3) / 4;
        for (int i = threadIdx.x; i < words; i += THREADS)
            copy16(squares + 4 * i, given.squares + 4 * i, true);
        copies_group();
    }
    DEVICE void make(const Given& given) const {  // all of the copies of the block have arrived
        const int n = int(given.cols) / SQUARES;
        for (int t = threadIdx.x / 32; t < given.n_tokens; t += WARPS) {
            const float s = rms_scale_of(squares + t * n, n, given.cols, given.eps);
            if (threadIdx.x % 32 == 0) scale[t] = s;
        }
        __syncthreads();
    }
};
#endif

// Asks the first AHEAD KB of the block's lines into L2, without what the first loads bring: the
// bytes are on their way while the kernels before end. Lines come in the order of passes, and those
// of one pass get equal parts.
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

// Multiplies the LINES lines of the block with N tokens. `end` knows what the lines are and what
// becomes of them: weight(line), row(line), rows; before() and after() the wait; store(sums).
template <class W, class End>
DEVICE void multiply(End& end, const Given& given) {
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
    int at[ROWS];  // of each line the unit that is multiplied next, counted in the whole weight
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
    int token[N];  // bytes from the first
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
        // Multiplies unit u + v of each line, which is raw[i]. Requests first what raw[i] holds
        // next: the unit a round on, if it is `known` to exist. In the `last` full round that unit
        // may be missing; then it is the first unit of the next pass.
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
        // The numbers are made opaque. Otherwise the compiler would keep an address of 64 bits for
        // each plane of each row.
        const auto advance = [&] {
            u += ROUND;
            asm("" : "+r"(u));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                at[r] += ROUND;
                asm("" : "+r"(at[r]));
            }
        };
        // Rounds in which every lane has all units, and in the next one too; the last full round;
        // the rest. Nothing in the loop is conditional: the compiler would merge old and new values
        // of `raw` by copying them, and each copy waits for the load it copies.
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
    end.store(Sums{part, scale});
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

// The segment of this block, and the first of its lines there: each segment has whole blocks.
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

// Multiplies with the type of segment s; segments of one type share their code.
template <class End>
DEVICE void multiply_segment(int s, End& end, const Given& given) {
    constexpr bool one = Same<TYPE_0, TYPE_1>::value, two = Same<TYPE_0, TYPE_2>::value;
    constexpr bool last = Same<TYPE_1, TYPE_2>::value;
    if (s == 0 || (s == 1 && one) || (s == 2 && two)) {
        multiply<TYPE_0>(end, given);
    } else if (s == 1 || last) {
        if constexpr (!one) multiply<TYPE_1>(end, given);
    } else {
        if constexpr (!two && !last) multiply<TYPE_2>(end, given);
    }
}

#define SEGMENT(I) u8 *dst_##I, const u8 *w_##I, const float *bias_##I, i64 rows_##I
#define SEGMENTS {{dst_0, w_0, bias_0, rows_0}, {dst_1, w_1, bias_1, rows_1}, \
                  {dst_2, w_2, bias_2, rows_2}}
#define GIVEN_ARGUMENTS const u8 *x, i64 cols, i64 n_tokens, const float *squares, float eps
#define GIVEN Given{x, cols, int(n_tokens), squares, eps}
