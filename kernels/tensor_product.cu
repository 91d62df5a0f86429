// tensor_product: dst (n_tokens, rows) = x (n_tokens, cols) times w (rows, cols) transposed, plus a
// bias, for 9 to some hundred tokens. Quantised weights are read once, decoded in registers and
// multiplied on tensor cores. Up to three weights ("segments") of one x and type share a launch:
//   * Q, K and V, or a single weight: each has its own row tiles and its own dst;
//   * gate and up: they share their row tiles, and silu(gate) * up is stored.
//
// Weights are the rows (M) of the matrix product, tokens its columns (N). By custom tokens are M.
// There are two reasons to swap them: 8 tokens already fill an mma, and wgmma takes only its M
// matrix from registers, where the weights are decoded.
//
// In mma.m16n8k16 a lane has 2 times 4 columns of rows g and g + 8 (g = lane / 4). Any columns
// serve, if the activations have the same order. So a lane reads a unit of 32 weights as it is, and
// the decoded unit is the lane's input of 8 mma: two for each of four words. halves.cuh draws the
// order. Hopper's wgmma.m64nNk16 takes the same registers from four warps, and the activations from
// shared memory, once for all four warps: 16 rows of weights a warp with 8 to 128 tokens. The warp
// decodes the next weights meanwhile. Other devices use mma.sync.
//
// Activations come as tiles (half_tiles_* of dequantise.cu): for each 64 columns, TOKENS rows of
// 128 bytes in the layout of wgmma. The STEPS * 128 columns of a stage are neighbours, and so one
// copy. Weights are copied in their planes (staged.cuh), 16 bytes at a time. LOADING warps only
// request the STAGES stages of a ring; WM warps decode and multiply. Barriers in shared memory tell
// the WM warps that a stage is full, and the LOADING warps that it is empty. No warp waits for
// warps of its own kind. The first stages of weights are requested while the kernel before may
// still write the activations.
//
// A block has 16 WM rows, and one of K_PARTS parts of the columns. If CLUSTERED, and the device has
// clusters, the blocks of a tile are a cluster: each adds up a part of the tile through shared
// memory. Otherwise blocks leave their sums in `partial`, and the last block of the tile adds them.
// Both add in the order of the columns, so a result depends only on shapes.
//
// With gate and up a block has 8 WM rows of each. Gate has the upper eight of every warp's 16 rows,
// up the lower eight. So one lane has both sums of a result. Results that are quantised pass
// through shared memory, because the 32 results that share a scale belong to four warps.
//
// Macros: TYPE, TOKENS (of a block: 8, 16, 32, 64 or 128), WM (warps that multiply, a multiple of
// 4), LOADING (warps that load), STEPS, STAGES, BLOCKS (of an SM, which limits registers), K_PARTS
// (at most 8), CLUSTERED, EPILOGUE (0: products; silu(gate) * up: 1 as floats, 2 as Q8_ACT).
// workbench/backend/cuda/kernels/tiling.py chooses them. nvrtc.py compiles this file for sm_90a
// where the device is an sm_90.
//
// Arguments: dst (n_tokens, rows), w, bias (or 0) and rows of three segments (rows 0: no segment);
// gate and up have the same rows, with Q8_ACT a multiple of 32, and the dst of gate. Then x
// (tiles), partial (F32, TOKENS x 16 WM for each block), counters (u32, one for each tile; zero
// before and after), cols (a multiple of the type's block), n_tokens. Block: 32 (WM + LOADING).
// Grid: (tiles of rows of all segments, gate and up counted once, * tiles of tokens * K_PARTS, 1).
// K_PARTS is at most the number of stages of a row. Dynamic shared memory: the stages and 128
// bytes.
//
// Versions (8B model with Q4_0 weights, one H100 80GB HBM3;
// data/results/tuning/tensor_product-*.json; in brackets: without the change, in the same run).
//
// ms of the products of a step, by tokens:                             16    32    64    128
//   limits: reading the weights; tensor cores                         1.27               2.42
//   memory to registers, a stage ahead, warps along columns           3.15  3.96  5.70   9.76
//   cp.async, mma.sync, equal shares of all tiles' stages             2.56  3.31  4.46   7.31
//   the same with wgmma                                               2.43        3.60   5.13
//   a fixed part of the columns a block, added in a cluster           2.25        3.09   4.64
//   the same, added through memory (in a cluster)                     2.14               4.11
//                                                                    (2.21)             (3.88)
//   the next weights decoded across stages                                               4.22
//   four warps that load: kept                                                           4.02
//   two warps that load; one                                                       4.13, 4.44
//   addresses in 32 bits, each weight in its own launch               2.18  2.40  2.96   3.87
//   the same with mma.sync                                                               7.01
//   this file: Q, K, V and gate + up fused, no output head: kept      2.06  2.20  2.74   3.92
//  Not kept:
//   activations multicast to two row tiles, which wait for each other                    5.81
//   room for the next launch's blocks: no gain                        2.48
//   weights into L2 before pdl_wait: no gain                          2.6
//   two tiles of 16 rows a warp, or 16 warps: no gain                                    4.5
//   blocks so small that some SMs take three (2.15)                   2.68
//
// us of the launch of gate + up, by tokens:                            16                 128
//   8 warps that multiply, 2 blocks an SM, registers given away       28.4: kept
//                                                                    (33.3)
//   quantising with 32 columns a warp                                                    86.7
//   quantising with 4 columns a thread                                                   69.3
//   the same with a quick silu: kept (plain products: 54.3)                              59.4
//   random weights, not zeros, which take more power                                     71.0
//
// Without times:
//   one lane that frees a stage for its warp    as quick, but a race (racecheck)
//   integers (mma.m16n8k32) on the quants       scaling each 32 columns costs more
//
// The rest: at 16 tokens a launch takes some 5 us more than reading its weights. From 64 on
// instructions (190 for 16 x 128 weights, 104 of them to decode) and tensor cores overlap, but not
// fully. Gate and up are 224 tiles for 132 multiprocessors: 1.7 rounds, which take the time of 2.
// cuBLAS: the table in workbench/backend/cuda/kernels/gemm.py.
#include "tile_block.cuh"
#include "tile_results.cuh"
#include "warpgroup.cuh"

// Where threads have few registers, the threads that load give some to the threads that multiply.
constexpr int EACH = 65536 / (BLOCKS * (THREADS + LOADERS)) / 8 * 8, LOADER_HAS = 40;
constexpr int MULTIPLIER_HAS = (EACH * (WM + LOADING) - LOADER_HAS * LOADING) / WM / 8 * 8;
constexpr bool UNEVEN = WARPGROUPS && LOADING % 4 == 0 && EACH < 100;

// An entry of the ring of stages. `phase`: the parity of the number of completed rounds.
struct Entry {
    int at = 0;
    u32 phase = 0;
    DEVICE void next() {
        at = at + 1 == STAGES ? 0 : at + 1;
        phase ^= at == 0;
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

// A lane's weights for one piece (halves.cuh): four pairs of halves of each of its two rows.
using Fragments = u32[2][4];

// A lane's units of a step, one of each of its two rows.
struct LaneUnits {
    decltype(Planes<TYPE>::read(At<TYPE>{})) raw[2];
    u32 number;

    // Reads unit `unit` of a stage. The stage begins with unit u0 of each row.
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

// Adds the products of one piece: 8 columns of each of four units. With `first` the products
// replace the sums. The activations of the stage begin at x, those of the piece `offset` bytes
// later. A warpgroup only starts to multiply: the fragments must not change until
// `wait_for_products`.
DEVICE void add_products(Accumulators& acc, const Fragments& a, u32 x, int offset, bool first) {
#if WARPGROUPS
    products_begin();
    wgmma(acc, a[0][0], a[1][0], a[0][1], a[1][1], swizzled_matrix(x, offset), !first);
    wgmma(acc, a[0][2], a[1][2], a[0][3], a[1][3], swizzled_matrix(x, offset + 32), true);
    products_group();
#else
    const u32 lane = threadIdx.x % 32, word = (offset % 128 / 16 + lane / 8) ^ lane % 8;
    const u32 at = x + offset / 128 * 128 + lane % 8 * 128 + word * 16;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        u32 b[4];
        load_matrices(b, at + n * 1024);
        mma(acc[n], {a[0][0], a[1][0], a[0][1], a[1][1]}, {b[0], b[1]});
        mma(acc[n], {a[0][2], a[1][2], a[0][3], a[1][3]}, {b[2], b[3]});
    }
#endif
}

// Waits until the products of a warpgroup are done, except the newest PENDING groups.
template <int PENDING>
DEVICE void wait_for_products(Fragments& a) {
#if WARPGROUPS
    products_wait<PENDING>();
    // From here on the registers `a`, which these products have read, may be written.
#pragma unroll
    for (int r = 0; r < 2; r++)
        asm volatile("" : "+r"(a[r][0]), "+r"(a[r][1]), "+r"(a[r][2]), "+r"(a[r][3]));
#endif
}

// Adds the products of all stages of a block. A step of a lane has four pieces i = 0 .. 3, of 8
// columns each. While the tensor cores multiply a piece, the warp decodes the next piece, also
// across steps and stages. Two Fragments alternate: a[k % 2] is multiplied while the other is
// decoded. With STEPS 1, where 0' is the first piece of the next stage:
//
//   tensor cores | 0        | 1                     | 2        | 3         | 0'                | 1'
//   warp         | decode 1 | read next, decode 2   | decode 3 | decode 0' | free, decode 1'   | ..
//
// Each column starts a product, waits for the product before it, and then decodes. "read next"
// waits until the next stage is full, and reads the next units from shared memory. "free" reports
// that the stage before is empty: its last product has ended by then.
DEVICE void add_stages(Accumulators& acc, const u8* shared, u32 base, const Part& part, u32 units,
                       const Masks& masks) {
    const u32 full = base + FULL_AT, empty = base + EMPTY_AT;
    const auto read = [&](LaneUnits& to, u32 k, int entry, int step) {
        // lanes past the end of the row read its last unit
        const u32 u0 = (part.first + k) * UNITS;
        const u32 unit = min(4 * step + threadIdx.x % 4, units - 1 - u0);
        to.read(shared + W_AT + entry * W_BYTES, unit, u0, units, part.row0);
    };
    Entry entry;
    Fragments a[2] = {};
    LaneUnits now;
    barrier_wait(full, 0);
    read(now, 0, 0, 0);
    now.decode(0, a[0], masks);
#pragma unroll 1
    for (u32 at = 0; at < part.count; at++) {
        const int here = entry.at, before = here == 0 ? STAGES - 1 : here - 1;
        entry.next();
        LaneUnits next;
#pragma unroll
        for (int k = 0; k < 4 * STEPS; k++) {
            const int step = k / 4, i = k % 4;
            const int offset = step * X_STEP + i / 2 * (X_STEP / 2) + i % 2 * 64;
            add_products(acc, a[k % 2], base + here * X_BYTES, offset, k + at == 0);
            if (i == 1 && step + 1 < STEPS) read(next, at, here, step + 1);
            if (i == 1 && step + 1 == STEPS) {  // after the last stage: unused values
                if (at + 1 < part.count) barrier_wait(full + entry.at * 8, entry.phase);
                read(next, min(at + 1, part.count - 1), entry.at, 0);
            }
            if (i == 3) now = next;
            wait_for_products<1>(a[(k + 1) % 2]);
            if (k == 0 && at)  // the stage before is empty; each lane reports for its own reads
                barrier_arrive(empty + before * 8);
            now.decode((i + 1) % 4, a[(k + 1) % 2], masks);
        }
    }
    wait_for_products<0>(a[0]);
    wait_for_products<0>(a[1]);
}

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
        cluster_sync(), cluster_sync();  // as the warps that multiply
#endif
        return;
    }
    pdl_wait();
#if WARPGROUPS
    if constexpr (UNEVEN) registers_more<MULTIPLIER_HAS>();
    Accumulators acc;  // the first products set it
#else
    Accumulators acc = {};
#endif
    add_stages(acc, shared, base, part, units, Masks(u32(n_tokens >> 32)));
    const Result to = {part, bias_1, n_tokens, shared};
    finish(acc, shared, to, part, partial, counters);
}
