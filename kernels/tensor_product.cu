// tensor_product: dst (n_tokens, rows) = x (n_tokens, cols) times w (rows, cols) transposed, plus a
// bias, for a few tokens up to some hundred. Quantised weights are read once, decoded in registers
// and multiplied on tensor cores. Up to three weights ("segments") of one x and type share a
// launch, each with row tiles and a dst of its own: Q, K and V. Or gate and up: silu(gate) * up is
// stored.
//
// With weights as rows and tokens as columns of mma.m16n8k16, a lane needs 2 times 4 columns of
// rows g and g + 8 (g = lane / 4). Any columns serve if the activations have the same order. So a
// lane takes a unit of 32 weights as it lies; decoded, the unit is the lane's fragments of 8 mma.
// Hopper's wgmma.m64nNk16 takes the same fragments from four warps and the activations from shared
// memory, once for all four: 16 rows of weights a warp with 8 to 128 tokens, while the warp decodes
// the next ones. Elsewhere mma.sync does the same.
//
// Activations come as tiles (half_tiles_* of dequantise.cu): for each 64 columns, TOKENS rows of
// 128 bytes as wgmma wants them, in an order that makes 16 neighbouring columns the columns of one
// mma. The STEPS * 128 columns of a stage are neighbours: one copy. Weights are copied as they lie
// in the file (staged.cuh), 16 bytes at a time. LOADING warps do nothing but ask for the STAGES
// stages of a ring; WM warps decode and multiply. Barriers in shared memory tell either side that a
// stage is full or empty, and no warp waits for the others of its side. The first stages of weights
// are asked for while the kernel before may still write the activations.
//
// A block has 16 WM rows and one of K_PARTS parts of the columns. The blocks of a tile of results
// are a cluster if CLUSTERED (and the device has clusters): each adds up a part of the tile through
// shared memory. Otherwise they leave their sums in `partial`, and the last one adds them. Either
// way sums go in the order of the columns, so a result depends on shapes alone.
//
// Of gate and up a block has 8 WM rows each. Gate has the upper eight of every warp's sixteen, up
// the lower: the two sums that a result is made of are one lane's. Results to be quantised go
// through shared memory, because the 32 of a scale belong to four warps.
//
// Macros: TYPE, TOKENS (of a block: 8, 16, 32, 64 or 128), WM (warps that multiply, a multiple of
// 4), LOADING (warps that load), STEPS, STAGES, BLOCKS (of an SM, which bounds registers), K_PARTS
// (at most 8), CLUSTERED, EPILOGUE (0: products; silu(gate) * up: 1 as floats, 2 as Q8_ACT).
// workbench/backend/cuda/kernels/gemm.py chooses them. nvrtc.py compiles this file for sm_90a where the
// device is an sm_90.
//
// Arguments: dst (n_tokens, rows), w, bias (or 0), rows of three segments (rows 0: none); gate and
// up have the same rows, with Q8_ACT a multiple of 32, and the dst of gate. Then x (tiles), partial
// (F32, TOKENS x 16 WM for each block), counters (u32, one for each tile, zero; zero again
// afterwards), cols (a multiple of the type's block), n_tokens. Block 32 (WM + LOADING). Grid
// (tiles of rows of all segments * tiles of tokens * K_PARTS, 1), gate and up as one; no more
// K_PARTS than stages. Dynamic shared memory: the stages and 128 bytes.
//
// Versions (ms of the products of a step of an 8B model with Q4_0 weights, one H100 80GB HBM3,
// tokens 16, 32, 64, 128; reading the weights takes 1.27, tensor cores 2.42 at 128;
// data/results/tuning/tensor_product-*.json):
//   memory to registers, a stage ahead, warps along columns   3.15 3.96 5.70 9.76
//   cp.async, mma.sync, equal shares of all tiles' stages     2.56 3.31 4.46 7.31
//   the same with wgmma                                       2.43 at 16, 3.60 at 64, 5.13 at 128
//   a fixed part of the columns a block, added in a cluster   2.25 at 16, 3.09 at 64, 4.64 at 128
//   the same added through memory                             2.14 (2.21) at 16, 4.11 (3.88) at 128
//   the next fragments decoded across stages                  4.22 at 128
//   warps that load: four, two, one                           4.02, 4.13, 4.44 at 128: four kept
//   addresses in 32 bits, each weight alone                   2.18 2.40 2.96 3.87 (mma.sync 7.01)
//   this file: Q, K, V and gate + up fused, no output head    2.06 2.20 2.74 3.92: kept
//   8 warps that multiply, two blocks an SM, registers given  28.4 us (33.3) at 16, gate + up: kept
//   quantising: 32 columns a warp, 4 columns a thread         86.7, 69.3 us at 128, gate + up
//   so, with a quick silu                                     59.4 us: kept (plain products 54.3)
//   random weights, not zeros: more power                     71.0 us at 128, gate + up
//   one lane that frees a stage for its warp                  as quick, and a race (racecheck)
//   activations multicast to two row tiles                    5.81 at 128: they wait for each other
//   room for the next launch's blocks                         2.48 at 16: no gain
//   weights ahead to L2 before pdl_wait                       2.6 at 16: no gain
//   two tiles of 16 rows a warp, or 16 warps                  4.5 at 128: no gain
//   blocks so small that some SMs take three                  2.68 at 16 for 2.15
//   integers (mma.m16n8k32) on the quants                     scaling each 32 columns costs more
// What is left: at 16 tokens some 5 us a launch beside its weights. From 64 on instructions (190
// for 16 x 128 weights, 104 of them decode) and tensor cores overlap, but not wholly. Gate and up
// are 224 tiles for 132 multiprocessors: 1.7 rounds that take 2. Against cuBLAS: the table in
// cuda/gemm.py.
#ifndef TYPE
#define TYPE Q4_0
#define TOKENS 16
#define WM 4
#define LOADING 4
#define STEPS 2
#define STAGES 5
#define BLOCKS 2
#define K_PARTS 2
#define CLUSTERED 0
#define EPILOGUE 0
#endif

#define GATED (EPILOGUE > 0)
#define QUANTISED (EPILOGUE == 2)
#define THREADS (32 * WM)  // that multiply
#define LOADERS (32 * LOADING)
#define LOADER (threadIdx.x - THREADS)
#define WEIGHTS (1 + GATED)  // of a tile
#define ROWS (16 * WM / WEIGHTS)  // of each: what a block has of dst

#include "staged.cuh"
#include "warpgroup.cuh"

#define CLUSTERS (CLUSTERED && K_PARTS > 1 && __CUDA_ARCH__ >= 900)

static_assert(WM % 4 == 0, "warpgroups are whole");

constexpr int X_STEP = TOKENS * 256;  // bytes of 128 columns of activations
constexpr int X_BYTES = STEPS * X_STEP, W_BYTES = WEIGHTS * Stage<TYPE>::SIZE;  // of a stage
// in shared memory: activations of all stages, weights of all stages, barriers
constexpr int W_AT = STAGES * X_BYTES, FULL_AT = W_AT + STAGES * W_BYTES;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8, LAST_AT = EMPTY_AT + STAGES * 8;
constexpr int GROUPS = TOKENS / 8;
constexpr bool BULK = __CUDA_ARCH__ >= 900;  // copies of any size, by one thread

static_assert(STAGES < 8, "128 bytes hold the barriers");

// Where threads have few registers, those that load leave some to those that multiply.
constexpr int EACH = 65536 / (BLOCKS * (THREADS + LOADERS)) / 8 * 8, LOADER_HAS = 40;
constexpr int MULTIPLIER_HAS = (EACH * (WM + LOADING) - LOADER_HAS * LOADING) / WM / 8 * 8;
constexpr bool UNEVEN = WARPGROUPS && LOADING % 4 == 0 && EACH < 100;

// The first of a lane's two rows of the block. The second is 8 on, or with gate and up the same row
// of the other weight.
DEVICE u32 row_of() { return threadIdx.x / 32 * (16 / WEIGHTS) + threadIdx.x % 32 / 4; }

// An entry of the ring of stages: `phase` is the parity of how often it has gone round.
struct Entry {
    int at = 0;
    u32 phase = 0;
    DEVICE void next() {
        at = at + 1 == STAGES ? 0 : at + 1;
        phase ^= at == 0;
    }
};

struct Segment {
    float* dst;
    const u8* w;
    const float* bias;
    i64 rows;
    DEVICE u32 tiles() const { return (u32(rows) + ROWS - 1) / ROWS; }
};

// What a block computes: rows of `segment` from row0 and tokens from `token` on, of `count` stages.
// `tile` counts the tiles of all segments.
struct Part {
    Segment segment;
    u32 row0, token, first, count, number, tile;  // first: stage. number: of K_PARTS
    DEVICE Part(const Segment& s0, const Segment& s1, const Segment& s2, u32 units,
                u32 token_tiles) {
        const u32 stages = (units + UNITS - 1) / UNITS;
        tile = blockIdx.x / K_PARTS, number = blockIdx.x % K_PARTS;
        token = tile % token_tiles * TOKENS;
        first = stages * number / K_PARTS, count = stages * (number + 1) / K_PARTS - first;
        u32 rows = tile / token_tiles;  // which tile of rows: of all, then of the segment
        segment = s0;
        if (!GATED && rows >= s0.tiles()) {
            rows -= s0.tiles(), segment = s1;
            if (rows >= s1.tiles()) rows -= s1.tiles(), segment = s2;
        }
        row0 = rows * ROWS;
    }
};

// loading ----------------------------------------------------------------------------------------

struct Loader {
    u32 base, units, rows;
    const u8* w[WEIGHTS];
    const u8* x;
    Part part;

    DEVICE void weights(u32 k, int entry) const {
        const u32 to = base + W_AT + entry * W_BYTES, u0 = (part.first + k) * UNITS;
#pragma unroll
        for (int i = 0; i < WEIGHTS; i++)
            Stage<TYPE>::request(to + i * Stage<TYPE>::SIZE, w[i], units, part.row0, rows, u0);
    }
    DEVICE void activations(u32 k, int entry) const {
        const u32 row = (units + 15) / 16 * 4 * X_STEP;  // of a tile of tokens
        const u8* from = x + i64(part.token / TOKENS) * row + i64(part.first + k) * X_BYTES;
        const u32 to = base + entry * X_BYTES, full = base + FULL_AT + entry * 8;
        if constexpr (BULK) {
            if (LOADER != 0) return;
            barrier_expect(full, X_BYTES);
            copy_bulk(to, from, X_BYTES, full);
        } else {
#pragma unroll 4
            for (u32 at = LOADER * 16; at < X_BYTES; at += LOADERS * 16)
                copy16(to + at, from + at, true);
        }
    }
    DEVICE void run() const {
        Entry entry;
        u32 k = 0;
        if constexpr (BULK) {
            const u32 early = min(part.count, u32(STAGES));
#pragma unroll 1
            for (; k < early; k++) {
                weights(k, k);
                barrier_arrive_after_copies(base + FULL_AT + k * 8);
            }
            pdl_wait();
#pragma unroll 1
            for (u32 j = 0; j < early; j++) activations(j, j);
        }
#pragma unroll 1
        for (; k < part.count; k++) {
            if (k >= STAGES) barrier_wait(base + EMPTY_AT + entry.at * 8, entry.phase);
            const int to = k < STAGES ? k : entry.at;
            activations(k, to);
            weights(k, to);
            barrier_arrive_after_copies(base + FULL_AT + to * 8);
            if (k >= STAGES) entry.next();
        }
        copies_wait<0>();
    }
};

// multiplying ------------------------------------------------------------------------------------

using Sums = float[GROUPS][4];
using Fragments = u32[2][4];  // of either row: four pairs of halves

// A lane's units of a step, one of either row.
struct Units {
    decltype(Planes<TYPE>::read(At<TYPE>{})) raw[2];
    u32 number;

    // Unit `unit` of a stage that begins with unit u0 of its rows.
    DEVICE void read(const u8* stage, u32 unit, u32 u0, u32 units, u32 row0) {
        number = (u0 + unit) % 8;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u8* weight = stage + (GATED ? r * Stage<TYPE>::SIZE : 0);
            const u32 row = row_of() + (GATED ? 0 : 8 * r);
            raw[r] = Planes<TYPE>::read(At<TYPE>{weight, row, unit, (row0 + row) * units + u0});
        }
    }
    DEVICE void decode(int i, Fragments& a, const Masks& masks) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const auto by = Halves<TYPE>::factors(raw[r], number);
            Halves<TYPE>::pairs(raw[r], number, by, i, a[r], masks);
        }
    }
};

// Adds, or with `first` sets, the products of 8 columns of each of four units. The activations lie
// `offset` bytes behind the beginning of the stage. A warpgroup only begins to multiply: the
// fragments must stay until all but the newest group of products are done.
DEVICE void add_products(Sums& acc, const Fragments& a, u32 x, int offset, bool first) {
#if WARPGROUPS
    products_begin();
    multiply(acc, a[0][0], a[1][0], a[0][1], a[1][1], swizzled_matrix(x, offset), !first);
    multiply(acc, a[0][2], a[1][2], a[0][3], a[1][3], swizzled_matrix(x, offset + 32), true);
    products_group();
#else
    const u32 lane = threadIdx.x % 32, word = (offset % 128 / 16 + lane / 8) ^ lane % 8;
    const u32 at = x + offset / 128 * 128 + lane % 8 * 128 + word * 16;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        u32 b[4];
        load_matrices(b, at + n * 1024);
        multiply(acc[n], {a[0][0], a[1][0], a[0][1], a[1][1]}, {b[0], b[1]});
        multiply(acc[n], {a[0][2], a[1][2], a[0][3], a[1][3]}, {b[2], b[3]});
    }
#endif
}

// Waits for products of warpgroups: all, or all but the newest group.
template <int PENDING>
DEVICE void wait_for_products(Fragments& a) {
#if WARPGROUPS
    products_wait<PENDING>();
    // registers that products have read may be written from here on
#pragma unroll
    for (int r = 0; r < 2; r++)
        asm volatile("" : "+r"(a[r][0]), "+r"(a[r][1]), "+r"(a[r][2]), "+r"(a[r][3]));
#endif
}

// Sums of a block's stages. Each step of a lane is 4 times 8 columns. While the tensor cores have
// one of the four, the next is decoded, also across stages.
DEVICE void add_stages(Sums& acc, const u8* shared, u32 base, const Part& part, u32 units,
                       const Masks& masks) {
    const u32 full = base + FULL_AT, empty = base + EMPTY_AT;
    const auto read = [&](Units& to, u32 k, int entry, int step) {  // past the end: the last unit
        const u32 u0 = (part.first + k) * UNITS;
        const u32 unit = min(4 * step + threadIdx.x % 4, units - 1 - u0);
        to.read(shared + W_AT + entry * W_BYTES, unit, u0, units, part.row0);
    };
    Entry entry;
    Fragments a[2] = {};
    Units now;
    barrier_wait(full, 0);
    read(now, 0, 0, 0);
    now.decode(0, a[0], masks);
#pragma unroll 1
    for (u32 at = 0; at < part.count; at++) {
        const int here = entry.at, before = here == 0 ? STAGES - 1 : here - 1;
        entry.next();
        Units next;
#pragma unroll
        for (int k = 0; k < 4 * STEPS; k++) {
            const int step = k / 4, i = k % 4;
            const int offset = step * X_STEP + i / 2 * (X_STEP / 2) + i % 2 * 64;
            add_products(acc, a[k % 2], base + here * X_BYTES, offset, k + at == 0);
            if (i == 1 && step + 1 < STEPS) read(next, at, here, step + 1);
            if (i == 1 && step + 1 == STEPS) {  // behind the last: any values, which nobody uses
                if (at + 1 < part.count) barrier_wait(full + entry.at * 8, entry.phase);
                read(next, min(at + 1, part.count - 1), entry.at, 0);
            }
            if (i == 3) now = next;
            wait_for_products<1>(a[(k + 1) % 2]);
            if (k == 0 && at)  // the last stage is done with; each lane speaks for its own reads
                barrier_arrive(empty + before * 8);
            now.decode((i + 1) % 4, a[(k + 1) % 2], masks);
        }
    }
    wait_for_products<0>(a[0]);
    wait_for_products<0>(a[1]);
}

#include "tile_results.cuh"

// the kernel -------------------------------------------------------------------------------------

#define SEGMENT(I) float *dst_##I, const u8 *w_##I, const float *bias_##I, i64 rows_##I
#define GIVEN(I) Segment{dst_##I, w_##I, bias_##I, rows_##I}

extern "C" __global__ void __launch_bounds__(THREADS + LOADERS, BLOCKS)
#if CLUSTERS
    __cluster_dims__(K_PARTS, 1, 1)
#endif
    tensor_product(SEGMENT(0), SEGMENT(1), SEGMENT(2), const u8* x, float* partial, u32* counters,
                   i64 cols, i64 n_tokens) {
    extern __shared__ __align__(1024) u8 shared[];
    pdl_trigger();
    const u32 units = u32(cols / 32), base = shared_address(shared);
    const u32 token_tiles = (u32(n_tokens) + TOKENS - 1) / TOKENS;
    const Part part(GIVEN(0), GIVEN(1), GIVEN(2), units, token_tiles);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < STAGES; k++) {
            barrier_init(base + FULL_AT + k * 8, LOADERS + BULK);
            barrier_init(base + EMPTY_AT + k * 8, THREADS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
#if WARPGROUPS
        if constexpr (UNEVEN) registers_less<LOADER_HAS>();
#endif
#if GATED
        Loader{base, units, u32(rows_0), {w_0, w_1}, x, part}.run();
#else
        Loader{base, units, u32(part.segment.rows), {part.segment.w}, x, part}.run();
#endif
#if CLUSTERS
        cluster_sync(), cluster_sync();  // as the others do
#endif
        return;
    }
    pdl_wait();
#if WARPGROUPS
    if constexpr (UNEVEN) registers_more<MULTIPLIER_HAS>();
    Sums acc;  // the first products set it
#else
    Sums acc = {};
#endif
    add_stages(acc, shared, base, part, units, Masks(u32(n_tokens >> 32)));
    const Result to = {part, bias_1, n_tokens, shared};
    finish(acc, shared, to, part, partial, counters);
}
