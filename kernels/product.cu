// Products with a few tokens (decode): dst (n_tokens, rows) = x (n_tokens, cols) times weights
// (rows, cols) transposed, with what follows the product done before its result is stored.
//
//   product_plain   up to three weights ("segments") of one x, each to its own dst, plus its bias
//   product_qkv     segments Q, K, V; bias; RoPE of Q and K; Q to dst, K and V to the cache
//   product_glu     segments gate and up; biases; silu(gate) * up, as floats or (GLU_Q8) as Q8_ACT
//
// Compiled for each use (workbench/backend/cuda_matvec.py chooses):
//   TYPE_0 TYPE_1 TYPE_2   weight types of the segments, all for one kind of activations
//   N                      tokens of the block: 1, 2, 4 or 8; those past n_tokens repeat the last
//   ROWS                   weight rows ("lines") of a warp, ROWS * N at most 32
//   UNROLL                 units of each line in flight per lane
//   SPLIT, WARPS           warps that share a line's columns; warps of a block
//   PASSES                 times that a warp takes ROWS lines, one after the other
//   BLOCKS                 blocks that must fit a multiprocessor
//   EPILOGUE               the one kernel wanted: 0 plain, 1 qkv, 2 glu
//   NARROW                 float weights whose cols are no multiple of 8: one weight at a time
//
// A lane reads units of 8 (float), 16 (Q8_0) or 32 weights, with 16-byte loads; its neighbours read
// the next ones. All loads of the first round are requested before the wait for the kernels before;
// from then on a unit is unpacked, its registers at once refilled with the unit a round later, and
// then multiplied, so that ROWS * UNROLL loads less one are always in flight. What limits these
// kernels is how many bytes are: memory needs about 16 KB per multiprocessor.
//
// Activations come through L1 and serve all lines of a warp. Float weights are multiplied in float;
// quantised ones in integers (dp4a), exact up to the scales.
//
// An element is summed as follows, whatever ROWS, UNROLL, WARPS, PASSES and N are: lane l of warp s
// of SPLIT takes units 32 s + l, 32 (s + SPLIT) + l, ..; the butterfly over lanes (16, 8, ..); the
// warps in order. All rounding is pinned: with one SPLIT a token's result is the same in every
// batch, and fused as unfused.
//
// GLU_Q8 needs all 32 columns of a group in one block, which makes them in PASSES: each requests
// the next one's first loads once its own are all in flight. As one pass of 64 lines, too large for
// all groups to run at once, it lost up to 16 points (8B, Q4_K: 77 % for 93 %).
//
// What was tried: % of read bandwidth (3.10 TB/s, one H100 80GB HBM3) with dependent launch, layers
// of an 8B model, one token. By ROWS, UNROLL, WARPS, BLOCKS, SPLIT; "-" was not run for the type.
//
//                     gate and up (28672 x 4096)        o (4096 x 4096)
//                     F16  Q8_0  Q4_0  Q4_K  Q6_K       F16  Q8_0  Q4_0  Q4_K  Q6_K
//     1 4 8 3 1        97    99    91     -     -        73    74    57     -     -
//     2 1 8 4 1         -     -     -    86    88         -     -     -    59    76
//     2 2 8 3 1        96    99    92    93    90        81    74    56    55    73
//     2 2 8 3 2        98    97    92    88    91        81    74    60    52    66
//     2 4 4 4 2        98   103     -     -     -        80    75     -     -     -
//     4 1 8 2 2         -     -     -    80    89         -     -     -    76    84
//     4 2 8 2 1        95    99    94     -     -        80    84    67     -     -
//     4 2 8 2 2        98    97    95     -     -        85    92    80     -     -
//
// Large weights hardly care. Small ones want all their blocks in flight at once, and few left over:
// 16 lines a block for o are 256 blocks, which 132 multiprocessors with 2 each take together.
//
// Also (figures not kept):
//   * one unit of 16 weights for Q8_0, not the block of 32: 16-byte loads at a stride of 32 bytes
//     ask for each sector twice;
//   * K types repacked so that a unit is one sub-block: one scale decoded per load, not two;
//   * sums of a warp are scattered while they are reduced: C values take C - 1 shuffles and then
//     one per remaining step, not 5 C.
#include "rope.cuh"
#include "quantise.cuh"
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
#define SPLIT 1
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef PASSES
#define PASSES 1
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int PASS = WARPS / SPLIT * ROWS, LINES = PASS * PASSES;  // lines of a pass, of a block
constexpr int STEP = 32 * SPLIT, ROUND = STEP * UNROLL;  // units
static_assert(WARPS % SPLIT == 0 && PASS % 2 == 0 && ROWS * N <= 32, "no such tuning");
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

// The sums of a block, of each of SPLIT warps, in shared memory.
struct Sums {
    const float* part;
    DEVICE float operator()(int line, int t) const {
        float v = part[line * N + t];
#pragma unroll
        for (int s = 1; s < SPLIT; s++) v = __fadd_rn(v, part[s * LINES * N + line * N + t]);
        return v;
    }
};

// Multiplies the LINES lines of the block with N tokens. `end` knows what the lines are and what
// becomes of them: weight(line), row(line), rows; before() and after() the wait; store(sums).
template <class W, class End>
DEVICE void multiply(End& end, const u8* x, i64 cols, int n_tokens) {
    using U = Units<W>;
    __shared__ float part[SPLIT * LINES * N];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = warp / SPLIT * ROWS, share = warp % SPLIT;
    const int units = int(cols / U::width), mine = share * 32 + lane;

    typename U::Planes planes[ROWS];
    int at[ROWS];  // the unit of each line, of all of its weight, that is multiplied next
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
    end.before();
    pdl_wait();
    end.after();

    const typename U::ActPlanes x_planes = U::act_planes(x, cols);
    int token[N];  // bytes from the first
#pragma unroll
    for (int t = 0; t < N; t++) token[t] = min(t, n_tokens - 1) * int(x_row_bytes<W>(cols));
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const bool more = pass + 1 < PASSES;
        int next[ROWS];  // the first unit of each line of the next pass
#pragma unroll
        for (int r = 0; r < ROWS; r++) next[r] = more ? start(pass + 1, r) : 0;
        float acc[ROWS * N] = {};
        int u = mine;
        // Multiplies unit u + v of each line, which is raw[i], having requested the unit to be
        // multiplied after it from there: a round on, if `known` to exist; else, in the `last` full
        // round, a round on where there is one; else the next pass's.
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
        // The numbers are made opaque, or the compiler would keep an address of 64 bits for each
        // plane of each row.
        const auto advance = [&] {
            u += ROUND;
            asm("" : "+r"(u));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                at[r] += ROUND;
                asm("" : "+r"(at[r]));
            }
        };
        // Rounds in which every lane has all units, the next one too; the last of them; the rest.
        // In the loop nothing is conditional: else the compiler merges old and new values of `raw`
        // by copying them, and each copy waits for the load it copies.
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
    __syncthreads();
    end.store(Sums{part});
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
DEVICE void multiply_segment(int s, End& end, const u8* x, i64 cols, i64 n_tokens) {
    constexpr bool one = Same<TYPE_0, TYPE_1>::value, two = Same<TYPE_0, TYPE_2>::value;
    constexpr bool last = Same<TYPE_1, TYPE_2>::value;
    if (s == 0 || (s == 1 && one) || (s == 2 && two)) {
        multiply<TYPE_0>(end, x, cols, int(n_tokens));
    } else if (s == 1 || last) {
        if constexpr (!one) multiply<TYPE_1>(end, x, cols, int(n_tokens));
    } else {
        if constexpr (!two && !last) multiply<TYPE_2>(end, x, cols, int(n_tokens));
    }
}

#define SEGMENT(I) u8 *dst_##I, const u8 *w_##I, const float *bias_##I, i64 rows_##I
#define SEGMENTS {{dst_0, w_0, bias_0, rows_0}, {dst_1, w_1, bias_1, rows_1}, \
                  {dst_2, w_2, bias_2, rows_2}}

#if !defined(EPILOGUE) || EPILOGUE == 0
struct Plain {
    Segment at;
    i64 rows;
    int first, n_tokens;
    DEVICE const u8* weight(int) const { return at.w; }
    DEVICE i64 row(int line) const { return min(i64(first + line), rows - 1); }
    DEVICE void before() {}
    DEVICE void after() {}
    DEVICE void store(const Sums& sum) const {
        for (int i = threadIdx.x; i < LINES * N; i += THREADS) {
            const int line = i % LINES, t = i / LINES;
            const i64 row = first + line;
            if (row < rows && t < n_tokens)
                reinterpret_cast<float*>(at.dst)[t * rows + row] = at.biased(sum(line, t), row);
        }
    }
};

// Arguments: dst, w, bias (or 0), rows of three segments (rows 0: none), x, cols, n_tokens.
extern "C" __global__ void LIMITS product_plain(SEGMENT(0), SEGMENT(1), SEGMENT(2), const u8* x,
                                                i64 cols, i64 n_tokens) {
    pdl_trigger();
    const Segment all[3] = SEGMENTS;
    Plain end;
    const int s = find(all, &end.at, &end.first);
    end.rows = end.at.rows, end.n_tokens = int(n_tokens);
    multiply_segment(s, end, x, cols, n_tokens);
}
#endif

#if !defined(EPILOGUE) || EPILOGUE == 1
// Lines 2 j and 2 j + 1 of Q and K are partners of the rotation; a thread has one such pair of one
// token.
struct Rotated {
    Segment at;
    i64 rows, n_rot, n_kv;
    int s, first, n_tokens, head_dim, pair, t;
    bool neox, turned;
    const int* positions;
    const float* freq_factors;
    const i64* cells;
    float theta_base, freq_scale;
    double turns;
    struct Kept {  // by a thread for itself during the product, which needs the registers
        float sine, cosine;
        int cell;
    }* kept;

    DEVICE const u8* weight(int) const { return at.w; }
    DEVICE i64 row(int line) const {
        const int l = int(min(i64(first + line), rows - 1)), half = int(n_rot) / 2;
        const int i = l % head_dim;
        if (s == 2 || !neox || i >= n_rot) return l;
        return l - i + i / 2 + i % 2 * half;
    }
    DEVICE void before() {
        const int i = (first + 2 * pair) % head_dim;
        turned = s < 2 && t < n_tokens && i < n_rot;
        if (turned) turns = rope_turns(i / 2, n_rot, theta_base, freq_scale, freq_factors);
    }
    DEVICE void after() {
        if (turned) {
            const Turn turn(positions[t], turns);
            kept->sine = turn.sine, kept->cosine = turn.cosine;
        }
        const i64 cell = s && t < n_tokens ? cells[t] : -1;
        kept->cell = cell >= 0 && cell < n_kv ? int(cell) : -1;
    }
    DEVICE void store(const Sums& sum) const {
        if (t >= n_tokens || first + 2 * pair >= rows) return;
        const i64 a = row(2 * pair), b = row(2 * pair + 1);
        float u = at.biased(sum(2 * pair, t), a), v = at.biased(sum(2 * pair + 1, t), b);
        if (turned) {
            const Turn turn(kept->sine, kept->cosine);
            const float w = turn.first(u, v);
            v = turn.second(u, v);
            u = w;
        }
        if (s == 0) {
            float* dst = reinterpret_cast<float*>(at.dst) + t * rows;
            dst[a] = u, dst[b] = v;
        } else if (kept->cell >= 0) {
            u16* dst = reinterpret_cast<u16*>(at.dst) + kept->cell * rows;
            dst[a] = float_to_half(u), dst[b] = float_to_half(v);
        }
    }
};

// Arguments: as product_plain for Q, K and V, with caches as dst of K and V; then positions,
// freq_factors (or 0), k_indices, v_indices, n_kv, head_dim, n_rot (both even), neox, theta_base,
// freq_scale. Rows are whole heads.
extern "C" __global__ void LIMITS product_qkv(SEGMENT(0), SEGMENT(1), SEGMENT(2), const u8* x,
                                              i64 cols, i64 n_tokens, const int* positions,
                                              const float* freq_factors, const i64* k_indices,
                                              const i64* v_indices, i64 n_kv, i64 head_dim,
                                              i64 n_rot, i64 neox, float theta_base,
                                              float freq_scale) {
    static_assert(LINES / 2 * N <= THREADS, "not a thread for each pair");
    pdl_trigger();
    const Segment all[3] = SEGMENTS;
    Rotated end;
    __shared__ Rotated::Kept kept[THREADS];
    end.kept = kept + threadIdx.x;
    end.s = find(all, &end.at, &end.first);
    end.rows = end.at.rows, end.n_tokens = int(n_tokens);
    end.n_rot = n_rot, end.n_kv = n_kv, end.head_dim = int(head_dim), end.neox = neox != 0;
    end.positions = positions, end.freq_factors = freq_factors;
    end.cells = end.s == 1 ? k_indices : v_indices;
    end.theta_base = theta_base, end.freq_scale = freq_scale;
    end.pair = threadIdx.x % (LINES / 2), end.t = threadIdx.x / (LINES / 2);
    multiply_segment(end.s, end, x, cols, n_tokens);
}
#endif

#if !defined(EPILOGUE) || EPILOGUE == 2
// Lines 2 c and 2 c + 1 are gate and up of one column of dst.
struct Glu {
    Segment gate, up;
    i64 rows;
    int first, n_tokens;  // first: column of dst
    DEVICE const u8* weight(int line) const { return line % 2 ? up.w : gate.w; }
    DEVICE i64 row(int line) const { return min(i64(first + line / 2), rows - 1); }
    DEVICE void before() {}
    DEVICE void after() {}
    DEVICE float value(const Sums& sum, int c, int t) const {  // as swiglu in elementwise.cu
        const float g = gate.biased(sum(2 * c, t), first + c);
        const float u = up.biased(sum(2 * c + 1, t), first + c);
        return g / (1.f + expf(-g)) * u;
    }
    DEVICE void store(const Sums& sum) const {
        constexpr int COLS = LINES / 2;
#ifdef GLU_Q8
        static_assert(COLS % 32 == 0 && WARPS >= 2, "a block has no whole group of 32 columns");
        const i64 bytes = act_row_bytes(rows);
        for (int i = threadIdx.x / 32; i < COLS / 32 * N; i += WARPS) {
            const int c = i % (COLS / 32) * 32, t = i / (COLS / 32);
            if (t < n_tokens && first + c < rows)
                quantise32(gate.dst + t * bytes, rows, first + c,
                           value(sum, c + threadIdx.x % 32, t));
        }
        for (int t = 0; t < n_tokens && blockIdx.x == 0; t++)
            zero_padding(gate.dst + t * bytes, rows, threadIdx.x);
#else
        for (int i = threadIdx.x; i < COLS * N; i += THREADS) {
            const int c = i % COLS, t = i / COLS;
            if (first + c < rows && t < n_tokens)
                reinterpret_cast<float*>(gate.dst)[t * rows + first + c] = value(sum, c, t);
        }
#endif
    }
};

// Arguments: dst, w_gate, bias_gate (or 0), w_up, bias_up (or 0), rows, x, cols, n_tokens. With
// GLU_Q8 rows are a multiple of 32.
extern "C" __global__ void LIMITS product_glu(u8* dst, const u8* w_gate, const float* bias_gate,
                                              const u8* w_up, const float* bias_up, i64 rows,
                                              const u8* x, i64 cols, i64 n_tokens) {
    pdl_trigger();
    Glu end = {{dst, w_gate, bias_gate, rows}, {dst, w_up, bias_up, rows}, rows,
               int(blockIdx.x) * (LINES / 2), int(n_tokens)};
    multiply<TYPE_0>(end, x, cols, int(n_tokens));
}
#endif
