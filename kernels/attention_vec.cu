// Attention of few tokens without tensor cores, over K and V of any type of the cache. The rows of
// a block are at most GROUP_ROWS query heads of one kv head, for one token. Its warps share the
// cells, tile by tile.
//
// A tile has 32 cells. For the scores a lane has one cell and all rows: it reads the cell's row of
// K, and the queries lie in shared memory, where all lanes read the same word. For the results a
// lane has two columns of V, cell by cell. So no product crosses lanes; only the maximum of each
// row and tile does. All arithmetic is float.
//
// Masked cells are read like other cells, but never change a result, whatever they hold. Their
// scores are replaced. Where a sum is not finite, the warp computes all again and leaves out values
// of weight zero. Finite values give the same bits both ways. A query whose every cell is masked
// gives zeros.
//
// One version.
#define ONE_TOKEN 1
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP_ROWS
#define GROUP_ROWS 4
#endif
#ifndef WARPS
#define WARPS 4
#endif
#define TILE_CELLS 32
#include "attention_plain.cuh"

using Tiles = Walk<CELLS, false>;

// The queries, the weights of each warp's present tile, and the partial result of each warp.
struct Memory {
    float q[GROUP_ROWS][HEAD_DIM];
    float weights[WARPS][GROUP_ROWS][CELLS];
    float sums[WARPS][GROUP_ROWS][HEAD_DIM];
    float2 parts[WARPS][GROUP_ROWS];
};
extern __shared__ __align__(16) u8 memory[];

// The running sums of a lane. most: the maximum of each row. weight: of the lane's own cells. sums:
// columns 2 (lane + 32 j) and the next.
struct Gathered {
    float most[GROUP_ROWS], weight[GROUP_ROWS], sums[GROUP_ROWS][PAIRS][2];

    DEVICE void clear() {
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            most[r] = NEG_INFINITY, weight[r] = 0;
#pragma unroll
            for (int j = 0; j < PAIRS; j++) sums[r][j][0] = sums[r][j][1] = 0;
        }
    }

    // Whether a sum of the warp is not finite. Then V was not finite, perhaps in a masked cell.
    DEVICE bool suspicious() const {
        float zero = 0;
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
#pragma unroll
            for (int j = 0; j < PAIRS; j++)
                zero = fmaf(sums[r][j][0], 0.f, fmaf(sums[r][j][1], 0.f, zero));
        }
        return __any_sync(~0u, zero != 0);
    }

    // Turns the scores of the lane's cell into weights, relative to the new maxima.
    DEVICE void weigh(float (&score)[GROUP_ROWS], float (&weights)[GROUP_ROWS][CELLS]) {
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            const float next = fmaxf(most[r], warp_max(score[r])), keep = rescale(most[r], next);
            const float w = exp2_fast(score[r] - (next == NEG_INFINITY ? 0.f : next));
            weights[r][threadIdx.x % 32] = w;
            weight[r] = fmaf(weight[r], keep, w), most[r] = next;
            if (keep != 1) {
#pragma unroll
                for (int j = 0; j < PAIRS; j++) sums[r][j][0] *= keep, sums[r][j][1] *= keep;
            }
        }
    }

    // Adds the values of a cell. CAREFUL: leaves out values of weight zero.
    template <bool CAREFUL>
    DEVICE void add(const u8* row, const float (&weights)[GROUP_ROWS][CELLS], int cell) {
        const int lane = threadIdx.x % 32;
        float2 v[PAIRS];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int col = 2 * (lane + 32 * j);
            v[j] = col < HEAD_DIM ? LoadsV::load2(row, col) : make_float2(0, 0);
        }
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            const float w = weights[r][cell];
            if (CAREFUL && w == 0) continue;
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                sums[r][j][0] = fmaf(w, v[j].x, sums[r][j][0]);
                sums[r][j][1] = fmaf(w, v[j].y, sums[r][j][1]);
            }
        }
    }
};

// Goes through the warp's tiles. k, v: the first cell of the kv head.
template <bool CAREFUL>
DEVICE void gather(Gathered& found, Memory& m, Tiles& tiles, const u8* k, const u8* v,
                   i64 k_stride, i64 v_stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 n_kv = tiles.cells.n_kv;
    float(&weights)[GROUP_ROWS][CELLS] = m.weights[warp];
    for (int tile; (tile = tiles.next()) >= 0;) {
        const i64 first = i64(tile) * CELLS, cell = min(first + lane, n_kv - 1);
        const u32 bias = tiles.masked ? tiles.cells.mask[cell] : 0;
        const bool seen = first + lane < n_kv && bias != MASKED;
        const u8* row = k + cell * k_stride;
        float score[GROUP_ROWS] = {};
#pragma unroll 4
        for (int c = 0; c < HEAD_DIM; c += 8) {
            float x[8];
            LoadsK::load8(row, c, x);
#pragma unroll
            for (int r = 0; r < GROUP_ROWS; r++) {
#pragma unroll
                for (int i = 0; i < 8; i++) score[r] = fmaf(m.q[r][c + i], x[i], score[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            const float sum = fmaf(half_to_float(u16(bias)), LOG2_E, score[r]);
            score[r] = seen ? sum : NEG_INFINITY;
        }
        found.weigh(score, weights);
        __syncwarp();  // the weights of all lanes are there
        const u8* values = v + first * v_stride;
        const int n = int(min(n_kv - first, i64(CELLS)));
#pragma unroll 4
        for (int i = 0; i < n; i++) found.template add<CAREFUL>(values + i * v_stride, weights, i);
        __syncwarp();  // no lane reads the weights any more
    }
}

DEVICE void compute(const Call& c, const Segment& s, const u8* k, const u8* v) {
    Memory& m = *reinterpret_cast<Memory*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Group own = group_of(c, s.group);
    if (!own.there) return;
    const Share& share = own.share;
    const i64 k_head = K_CELL::row_bytes(HEAD_DIM), v_head = V_CELL::row_bytes(HEAD_DIM);
    const i64 k_stride = c.kv_row_bytes(k_head), v_stride = c.kv_row_bytes(v_head);
    k += own.cell * k_stride + share.head_kv * k_head;
    v += own.cell * v_stride + share.head_kv * v_head;
    __syncthreads();  // no thread reads the data of the segment before any more
    for (int i = threadIdx.x; i < GROUP_ROWS * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, col = i % HEAD_DIM;
        const i64 head = i64(share.token_of(row)) * c.n_head + share.head_of(row);
        m.q[row][col] = c.q[head * HEAD_DIM + col] * (c.scale * LOG2_E);
    }
    __syncthreads();

    const Cells cells(nullptr, nullptr, c.mask, c.n_head_kv, c.n_kv, share);
    const u8* known = c.more.known + share.token * known_stride(c.n_kv);
    const int begin = s.begin + s.step * warp, stride = s.step * WARPS;
    Gathered found;
    found.clear();
    Tiles tiles(cells, known, begin, stride);
    tiles.end = min(tiles.end, s.end);
    gather<false>(found, m, tiles, k, v, k_stride, v_stride);
    if (found.suspicious()) {
        found.clear();
        Tiles again(cells, known, begin, stride);
        again.end = min(again.end, s.end);
        gather<true>(found, m, again, k, v, k_stride, v_stride);
    }
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++) {
        const float weight = warp_sum(found.weight[r]);
        if (lane == 0) m.parts[warp][r] = make_float2(found.most[r], weight);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int col = 2 * (lane + 32 * j);
            if (col >= HEAD_DIM) continue;
            m.sums[warp][r][col] = found.sums[r][j][0];
            m.sums[warp][r][col + 1] = found.sums[r][j][1];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < share.count * HEAD_DIM; i += THREADS) {
        const int row = i / HEAD_DIM, col = i % HEAD_DIM;
        float top = NEG_INFINITY, sum = 0, weight = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, m.parts[w][row].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float f = rescale(m.parts[w][row].x, top);
            sum = fmaf(m.sums[w][row][col], f, sum);
            weight = fmaf(m.parts[w][row].y, f, weight);
        }
        store_column(c, own, s, row, col, sum, top, weight);
    }
}

// Grid: see attention_plain.cuh; each token has a group for every GROUP_ROWS query heads of a kv
// head. Block: WARPS * 32 threads. Shared memory: a Memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_vec(float* dst, const float* q, const u8* k, const u8* v, const u16* mask,
                  float* scratch, const int* regions, const u8* known, const float* sinks,
                  i64 n_tokens, i64 n_head, i64 n_head_kv, i64 n_kv, i64 n_regions, i64 least,
                  i64 most, i64 groups, i64 entries, i64 piece, float scale) {
    pdl_trigger();
    pdl_wait();
    const Call c = {dst, q, mask, scratch, {regions, known, sinks, n_regions, least, most},
                    n_tokens, n_head, n_head_kv, n_kv, groups, entries, piece, scale};
    each_segment(c, [&](const Segment& s) { compute(c, s, k, v); });
}
