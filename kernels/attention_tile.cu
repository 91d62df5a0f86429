// Attention of many tokens without tensor cores, over K and V of any type of the cache. A block has
// 32 query rows of one kv head, for several tokens, and goes through tiles of TILE_CELLS cells.
//
// Shared memory holds a tile of K as floats, then the same cells of V. For the scores a thread has
// 2 rows and every 16th cell. For the weights 8 threads have a row. For the results a warp has 4
// rows, and each lane two columns. All arithmetic is float.
//
// Masked cells are read like other cells, but never change a result, whatever they hold. Their
// scores are replaced. In a tile of V with values that are not finite, values of weight zero are
// left out. A query whose every cell is masked gives zeros.
//
// One version.
#define ONE_TOKEN 0
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef TILE_CELLS
#define TILE_CELLS 32
#endif
#define GROUP_ROWS 32
#define WARPS 8
#include "attention_plain.cuh"

constexpr int OF_ROW = THREADS / GROUP_ROWS;   // threads that share the weights of a row
constexpr int WARP_ROWS = GROUP_ROWS / WARPS;  // rows whose results a warp has
constexpr int SCORES = CELLS / 16;             // scores of a thread, for each of its 2 rows
constexpr int WEIGHTS = CELLS / OF_ROW;        // weights of a thread
static_assert(GROUP_ROWS == 32 && OF_ROW == 8 && CELLS % 16 == 0, "no such tiling");

using Tiles = Walk<CELLS, true>;

struct Memory {
    float q[GROUP_ROWS][HEAD_DIM + 4];    // 4 more, so that rows lie in different banks
    float kv[CELLS][HEAD_DIM + 4];
    float scores[GROUP_ROWS][CELLS + 8];  // later weights
    float keep[GROUP_ROWS];               // the factor of sums relative to the earlier maximum
    float2 parts[GROUP_ROWS];             // maximum and weight
};
extern __shared__ __align__(16) u8 memory[];

// Loads the cells from `first` on as floats, and zeros after the last cell. Returns whether all
// values that this thread read are finite.
template <class L>
DEVICE bool load_cells(Memory& m, const u8* rows, i64 stride, i64 first, i64 n_kv) {
    constexpr int EIGHTS = HEAD_DIM / 8;
    float zero = 0;
    for (int i = threadIdx.x; i < CELLS * EIGHTS; i += THREADS) {
        const int cell = i / EIGHTS, c = i % EIGHTS * 8;
        float x[8] = {};
        if (first + cell < n_kv) L::load8(rows + (first + cell) * stride, c, x);
        float4* to = reinterpret_cast<float4*>(&m.kv[cell][c]);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
#pragma unroll
        for (int n = 0; n < 8; n++) zero = fmaf(x[n], 0.f, zero);
    }
    return zero == 0;
}

// Computes q.k of the tile, in powers of two.
DEVICE void score(Memory& m) {
    const int row = threadIdx.x / 16, cell = threadIdx.x % 16;
    float sum[2][SCORES] = {};
#pragma unroll 2
    for (int c = 0; c < HEAD_DIM; c += 4) {
        float4 x[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            x[r] = *reinterpret_cast<const float4*>(&m.q[row + 16 * r][c]);
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            const float4 y = *reinterpret_cast<const float4*>(&m.kv[cell + 16 * i][c]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sum[r][i] = fmaf(x[r].x, y.x, sum[r][i]);
                sum[r][i] = fmaf(x[r].y, y.y, sum[r][i]);
                sum[r][i] = fmaf(x[r].z, y.z, sum[r][i]);
                sum[r][i] = fmaf(x[r].w, y.w, sum[r][i]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < SCORES; i++) m.scores[row + 16 * r][cell + 16 * i] = sum[r][i];
    }
}

// Turns scores into weights, relative to the new maximum. `mask`: of the thread's row, from the
// tile's first cell on. `left`: cells from there to the last cell.
DEVICE void weigh(Memory& m, const u16* mask, i64 left, bool masked, float& most, float& weight) {
    const int row = threadIdx.x / OF_ROW, lane = threadIdx.x % OF_ROW;
    float own[WEIGHTS], next = most;
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++) {
        const int cell = lane + OF_ROW * i;
        const u32 bias = masked && cell < left ? mask[cell] : 0;
        const float sum = fmaf(half_to_float(u16(bias)), LOG2_E, m.scores[row][cell]);
        own[i] = cell < left && bias != MASKED ? sum : NEG_INFINITY;
        next = fmaxf(next, own[i]);
    }
#pragma unroll
    for (int o = 1; o < OF_ROW; o *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, o));
    const float keep = rescale(most, next), base = next == NEG_INFINITY ? 0.f : next;
    float all = 0;
    most = next;
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++) {
        const float w = exp2_fast(own[i] - base);
        m.scores[row][lane + OF_ROW * i] = w;
        all += w;
    }
    weight = fmaf(weight, keep, all);
    if (lane == 0) m.keep[row] = keep;
}

// Adds the values of the tile to the sums of the warp's rows. A lane has columns 2 (lane + 32 j)
// and the next. CAREFUL: leaves out values of weight zero.
template <bool CAREFUL>
DEVICE void add_values(const Memory& m, float (&sums)[WARP_ROWS][PAIRS][2]) {
    const int first = threadIdx.x / 32 * WARP_ROWS, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const float keep = m.keep[first + r];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) sums[r][j][0] *= keep, sums[r][j][1] *= keep;
    }
#pragma unroll 4
    for (int cell = 0; cell < CELLS; cell++) {
        float2 v[PAIRS];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int col = 2 * (lane + 32 * j);
            v[j] = make_float2(0, 0);
            if (col < HEAD_DIM) v[j] = *reinterpret_cast<const float2*>(&m.kv[cell][col]);
        }
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const float w = m.scores[first + r][cell];
            if (CAREFUL && w == 0) continue;
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                sums[r][j][0] = fmaf(w, v[j].x, sums[r][j][0]);
                sums[r][j][1] = fmaf(w, v[j].y, sums[r][j][1]);
            }
        }
    }
}

DEVICE void compute(const Call& c, const Segment& s, const u8* k, const u8* v) {
    Memory& m = *reinterpret_cast<Memory*>(memory);
    const Group own = group_of(c, s.group);
    if (!own.there) return;
    const Share& share = own.share;
    const i64 k_head = K_CELL::row_bytes(HEAD_DIM), v_head = V_CELL::row_bytes(HEAD_DIM);
    const i64 k_stride = c.kv_row_bytes(k_head), v_stride = c.kv_row_bytes(v_head);
    k += own.cell * k_stride + share.head_kv * k_head;
    v += own.cell * v_stride + share.head_kv * v_head;
    const float* q = c.q + i64(own.token) * c.n_head * HEAD_DIM;
    __syncthreads();  // no thread reads the data of the segment before any more
    for (int i = threadIdx.x; i < GROUP_ROWS * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, col = i % HEAD_DIM;
        const i64 head = i64(share.token_of(row)) * c.n_head + share.head_of(row);
        m.q[row][col] = q[head * HEAD_DIM + col] * (c.scale * LOG2_E);
    }

    const Cells cells(nullptr, nullptr, c.mask + own.token * c.n_kv, c.n_head_kv, c.n_kv, share);
    const u8* known = c.more.known + (own.token + share.token) * known_stride(c.n_kv);
    Tiles tiles(cells, known, s.begin, s.step);
    tiles.end = min(tiles.end, s.end);
    const int row = threadIdx.x / OF_ROW;
    const u16* mask = cells.mask + (share.token_of(row) - share.token) * c.n_kv;
    float most = NEG_INFINITY, weight = 0, sums[WARP_ROWS][PAIRS][2] = {};
    for (int tile; (tile = tiles.next()) >= 0;) {
        const i64 first = i64(tile) * CELLS;
        __syncthreads();  // the queries are complete; no thread reads the earlier tile any more
        load_cells<LoadsK>(m, k, k_stride, first, c.n_kv);
        __syncthreads();
        score(m);
        __syncthreads();  // the scores are there; none reads K any more
        const bool finite = load_cells<LoadsV>(m, v, v_stride, first, c.n_kv);
        weigh(m, mask + first, c.n_kv - first, tiles.masked, most, weight);
        if (__syncthreads_or(!finite)) {
            add_values<true>(m, sums);
        } else {
            add_values<false>(m, sums);
        }
    }
#pragma unroll
    for (int o = 1; o < OF_ROW; o *= 2) weight += __shfl_xor_sync(~0u, weight, o);
    if (threadIdx.x % OF_ROW == 0) m.parts[row] = make_float2(most, weight);
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const int at = threadIdx.x / 32 * WARP_ROWS + r;
        if (at >= share.count) continue;
        const float2 part = m.parts[at];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int col = 2 * (lane + 32 * j);
            if (col >= HEAD_DIM) continue;
            store_column(c, own, s, at, col, sums[r][j][0], part.x, part.y);
            store_column(c, own, s, at, col + 1, sums[r][j][1], part.x, part.y);
        }
    }
}

// Grid: see attention_plain.cuh; a group has 32 rows. With REGIONS each sequence has its own
// groups. Block: 256 threads. Shared memory: a Memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_tile(float* dst, const float* q, const u8* k, const u8* v, const u16* mask,
                   float* scratch, const int* regions, const u8* known, const float* sinks,
                   i64 n_tokens, i64 n_head, i64 n_head_kv, i64 n_kv, i64 n_regions, i64 least,
                   i64 most, i64 groups, i64 entries, i64 piece, float scale) {
    pdl_trigger();
    pdl_wait();
    const Call c = {dst, q, mask, scratch, {regions, known, sinks, n_regions, least, most},
                    n_tokens, n_head, n_head_kv, n_kv, groups, entries, piece, scale};
    each_segment(c, [&](const Segment& s) { compute(c, s, k, v); });
}
