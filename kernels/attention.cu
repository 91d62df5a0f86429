// attention: softmax(scale * q.k + mask) v, over cells 0 .. n_kv - 1 of a cache of halves.
//
//   attention_decode   few query rows. A block has 8 * ROW_SETS rows of one kv head, and one share
//                      of the cells. Each warp has its own tiles of 16 cells. CLUSTER blocks merge
//                      their results in shared memory. Where there are several clusters, the last
//                      of them merges all (attention_merge.cuh). Below sm_90 the last block merges
//                      all.
//   attention_prefill  many query rows. A block has 16 rows per warp and goes through all cells.
//                      Its warps share tiles of TILE_CELLS cells.
//
// Compiled for each use (workbench/backend/cuda/kernels/attention.py chooses):
//   PREFILL      0: attention_decode, 1: attention_prefill
//   HEAD_DIM     columns of a head
//   WARPS        of a block
//   STAGES       tiles in shared memory, per warp (decode) or per block (prefill)
//   ROW_SETS     sets of 8 rows of a block (decode)
//   CLUSTER      blocks of a cluster (decode)
//   TILE_CELLS   cells of a tile (prefill)
//   STREAM       how cells are dealt out (attention_stream.cuh)
//   REGIONS, SKIP, SINKS   see attention_walk.cuh and attention.cuh
//
// Both kernels form K q and V^T p with mma.sync (attention_rows.cuh), from tiles that cp.async
// copies to shared memory. The rows of a kv head are all query heads of its group, for several
// tokens. So K and V are read once for all these rows.
//
// Masked cells never change a result, whatever they hold. attention_walk.cuh says which of them are
// not read. The score of a masked cell is replaced, so K may hold anything. V is multiplied with a
// weight of zero, but NaN and infinity survive that. Clearing V in every tile would cost time.
// Instead the sums are checked once, at the end. If a sum is not finite, the kernel computes all
// again, row by row, and clears V where a row's weight is zero. Finite values give the same bits
// both ways, so only a cache with such values costs time. A query whose every cell is masked gives
// zeros.
//
// Rounding: q * scale * log2(e) and the weights (0 .. 1, relative to the running maximum) are
// rounded to halves; all else is float. A weight under 2^-25 of its row's largest counts as zero.
//
// Reasons for the design:
//   * Memory limits decode of a long cache. A warp waits only for its own copies, and requests all
//     its STAGES tiles before it loads its queries: 64 KB a block at head_dim 128, where about 40
//     KB a multiprocessor keep the memory busy.
//   * A chain limits decode of a short cache: copy, product, maximum, product, merging. So each
//     warp has one tile where there are enough blocks. A cluster merges within its shared memory:
//     no round trip to L2, no fence, no counter. Each block merges some of the columns, with all
//     loads at once.
//   * There are at most as many blocks as run at once. Tiles are dealt out evenly, to within one
//     tile.
//   * Blocks have few rows while cells are few. Other blocks that read the same cells find them in
//     L2.
//   * Scores are transposed (cells by rows). So the unit is 8 rows, not 16, which halves the
//     products and registers of a single token. movmatrix transposes the weights back.
//   * The mask is copied with the tile, and ldmatrix gives it the layout of the scores. A tile
//     without masked cells skips it.
//   * Shared memory stays under 99 KB, which every architecture from sm_80 on allows a block.
//
// Versions (one H100 80GB HBM3, 32 heads, 8 kv heads, head_dim 128, caches not in L2, launched
// programmatically; data/results/tuning/attention-*).
//
// us of a launch of decode, by tokens and cells:         1 token               8 tokens
//                                                   256  4096  16384      256  4096  16384
//   limit: reading K and V                          0.3   5.4   22
//   1  floats, a head a block (tests/gpu/twins)     7.5  22     65        8.9   122    401
//   2  tensor cores, the last block merges all      6.3  13.1   34       16      26     49
//   2  with the best tuning                         5.1  10.9   29
//   3  this file: clusters, rows spread: kept       3.7  13.5   32        6.0    18     50
//   2  one block a head                             5.1
//   2  two blocks a head merge through memory       5.9
//   2  33 blocks a head                                  15.6
//   2  16 blocks a head                                  11.4
//
// us of a launch of decode, 64 tokens over 256 cells:
//   3  16 rows and 8 warps from 9 tokens on: kept      7.4 (without: 8.2)
//   3  NaN in masked cells, so all is done twice      27.9 (without: 8.2)
//
// us of a launch of prefill, 512 tokens over 4096 cells:
//   1                                               2026
//   2  4 warps, 64 cells: kept                       175
//   2  8 warps; 32 cells; 3 stages                   175, 201, 198
#include "attention_merge.cuh"
#include "attention_rows.cuh"
#include "attention_stream.cuh"
#include "attention_walk.cuh"

#ifndef PREFILL
#define PREFILL 0
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef ROW_SETS
#define ROW_SETS 1
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef TILE_CELLS
#define TILE_CELLS 64
#endif

constexpr int THREADS = 32 * WARPS;
extern __shared__ __align__(16) u8 memory[];

// The arguments of a launch (see the kernels).
struct Attention {
    u8* dst;
    const float* q;
    const u16 *k, *v, *mask;
    u8* scratch;
    u32* counters;
    More more;
    i64 n_tokens, n_head, n_head_kv, n_kv;
    float scale;
    bool quantised;

    DEVICE void attend(const Piece& piece) const;
};

// A ring of tiles in shared memory. In attention_decode each warp has a ring; in attention_prefill
// the block has a single ring. FIRST: tiles that are requested before the first is used.
#if PREFILL
constexpr int SETS = 2, GROUP_ROWS = 16 * WARPS, CELLS = TILE_CELLS, FIRST = STAGES - 1;
#else
constexpr int SETS = ROW_SETS, GROUP_ROWS = 8 * SETS, CELLS = 16, FIRST = STAGES;
#endif
using Ring = Tile<CELLS, GROUP_ROWS>[STAGES];
using Tiles = Walk<CELLS, bool(PREFILL)>;

// The requested tiles of a ring. n: how many. masked: bit `entry`: that tile has a mask.
struct Asked {
    int n;
    u32 masked;
};

// Requests a tile for an entry of the ring, if there is one.
DEVICE void ask(Asked& asked, Ring& ring, int entry, Tiles& tiles) {
    const int tile = tiles.next();
    if (tile >= 0) {
        tiles.cells.request<PREFILL ? THREADS : 32>(
            ring[entry], i64(tile) * CELLS, PREFILL ? threadIdx.x : threadIdx.x % 32, tiles.masked);
        asked.n++;
        if (SKIP == 3) asked.masked = (asked.masked & ~(1u << entry)) | u32(tiles.masked) << entry;
    }
    copies_group();
}

// Requests the first tiles.
DEVICE Asked start(Ring& ring, Tiles& tiles) {
    Asked asked = {0, 0};
#pragma unroll
    for (int s = 0; s < FIRST; s++) ask(asked, ring, s, tiles);
    return asked;
}

#if !PREFILL

#if __CUDA_ARCH__ >= 900 && CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(1, CLUSTER, 1)
constexpr int TEAM = CLUSTER;
#else  // no clusters: blocks work alone, and the last block merges all
#define IN_CLUSTERS
constexpr int TEAM = 1;
#endif
using WarpSums = float[GROUP_ROWS][DIM + 4];  // 4 more: rows of a store are on different banks
static_assert(sizeof(WarpSums) <= sizeof(Ring), "sums of a warp lie where its tiles were");

// Goes through the warp's tiles.
template <bool CAREFUL>
DEVICE void gather(Rows<SETS>& rows, Ring& ring, Tiles& tiles, Asked asked,
                   const int (&mask_row)[SETS]) {
    int entry = 0;
    for (int done = 0; done < asked.n; done++) {
        copies_wait<STAGES - 1>();
        __syncwarp();  // the copies of every lane have arrived
        rows.template add<CAREFUL>(ring[entry], mask_row, SKIP < 3 || asked.masked >> entry & 1);
        __syncwarp();  // no lane reads the tile any more
        ask(asked, ring, entry, tiles);
        entry = entry == STAGES - 1 ? 0 : entry + 1;
    }
    copies_wait<0>();
    __syncwarp();
}

// Computes one group of rows, over all its cells or over a share of them.
DEVICE void Attention::attend(const Piece& piece) const {
    __shared__ float2 of_warps[WARPS][GROUP_ROWS], of_block[GROUP_ROWS];  // maxima, weights
    __shared__ bool last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = int(n_head) / int(n_head_kv);
    const int head_kv = piece.group % u32(n_head_kv), number = piece.group / u32(n_head_kv);
#if REGIONS
    if (!STREAM) pdl_wait();
    const Tokens own(more, int(n_tokens), number, group, GROUP_ROWS);
    if (own.tile < 0) return;
#else
    const Tokens own(int(n_tokens), number);
#endif
    u8* const to = dst + own.token * (quantised ? act_row_bytes(n_head * HEAD_DIM)
                                                : n_head * HEAD_DIM * 4);
    const float* const queries = q + i64(own.token) * n_head * HEAD_DIM;
    const i64 skipped = own.cell * n_head_kv * HEAD_DIM;
    const Share share(head_kv, group, own.tile * GROUP_ROWS, GROUP_ROWS, own.count * group);
    const Cells cells(k + skipped, v + skipped, mask + own.token * n_kv, n_head_kv, n_kv, share);
    const Output output{to, more.sinks, n_head, quantised};
    const u8* known = more.known + (own.token + share.token) * known_stride(n_kv);
    const int begin = (STREAM ? piece.first : piece.share * WARPS) + warp;
    const int stride = STREAM ? WARPS : piece.shares * WARPS;
    Ring* rings = reinterpret_cast<Ring*>(memory);
    int mask_row[SETS];
#pragma unroll
    for (int s = 0; s < SETS; s++) mask_row[s] = share.token_of(8 * s + lane % 8) - share.token;
    const float* q_rows[SETS];
    Rows<SETS>::locate(q_rows, queries, share, 0, int(n_head));
#if !REGIONS && !STREAM  // the addresses of the cells are known before the wait
    // This store keeps the computation of the addresses before the wait. Without a store that
    // depends on it, the compiler would move it after the wait.
    __shared__ volatile i64 early[THREADS];
    i64 found = i64(cells.k) ^ i64(cells.v) ^ i64(cells.mask) ^ begin ^ stride;
#pragma unroll
    for (int s = 0; s < SETS; s++) found ^= mask_row[s] ^ i64(q_rows[s]);
    early[threadIdx.x] = found;
    pdl_wait();
#endif
    Tiles tiles(cells, known, begin, stride);
    if (STREAM) tiles.end = min(tiles.end, piece.end);

    Rows<SETS> rows;
    Asked asked;
    if constexpr (rows.STORED) {
        asked = start(rings[warp], tiles);
        rows.template load<WARPS>(queries, share, 0, int(n_head), scale,
                                  reinterpret_cast<uint2*>(rings + WARPS), warp);
        __syncthreads();
    } else {  // queries are requested first: a warp with one tile would wait for them
        float2 wide[STEPS][SETS][2];
        rows.request(q_rows, wide);
        asked = start(rings[warp], tiles);
        rows.convert(wide, scale * LOG2_E);
    }
    rows.clear();
    gather<false>(rows, rings[warp], tiles, asked, mask_row);
    if (rows.suspicious()) {
        Tiles again(cells, known, begin, stride);
        if (STREAM) again.end = min(again.end, piece.end);
        asked = start(rings[warp], again);
        rows.clear();
        gather<true>(rows, rings[warp], again, asked, mask_row);
    }
    rows.add_weights();
    WarpSums& sums = *reinterpret_cast<WarpSums*>(rings + warp);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 8 * s + lane % 4 * 2 + i % 2;
#pragma unroll
            for (int d = 0; d < STEPS; d++)
                sums[row][16 * d + lane / 4 + i / 2 * 8] = rows.sums[d][s][i];
            if (lane < 4 && i < 2)
                of_warps[warp][row] = make_float2(rows.most[s][i], rows.weight[s][i]);
        }
    }
    __syncthreads();

    const int rank = piece.share % TEAM, team = piece.share / TEAM, teams = piece.shares / TEAM;
    const int items = share.count * QUADS, mine = 32 * (warp * TEAM + rank);
    const Parts<GROUP_ROWS> parts(scratch, piece, teams);
    const auto finish = [&](const Item& item, const Partial& all) {
        if (teams == 1) {
            output.store(share, item, all);
        } else {
            parts.store(team, item, all);
        }
    };

    // Merge the warps of the block. A block of a cluster stores the sum in place of warp 0's sum.
    for (int first = 32 * warp; first < items; first += THREADS) {
        const Item item(first, items);
        const Partial whole = merged<WARPS>(WARPS, [&](int w) -> Partial {
            if (!item.there) return {};  // repeats the last item, whose lane may have replaced it
            const WarpSums& own = *reinterpret_cast<const WarpSums*>(rings + w);
            const float2 part = of_warps[w][item.row];
            return {*reinterpret_cast<const float4*>(&own[item.row][4 * item.quad]), part.x,
                    part.y};
        });
        if (TEAM == 1) {
            finish(item, whole);
        } else if (item.there) {
            WarpSums& block = *reinterpret_cast<WarpSums*>(rings);
            *reinterpret_cast<float4*>(&block[item.row][4 * item.quad]) = whole.sum;
            if (item.quad == 0) of_block[item.row] = make_float2(whole.most, whole.weight);
        }
    }
#if __CUDA_ARCH__ >= 900 && CLUSTER > 1
    // Merge the blocks of the cluster. Each block merges some of the columns.
    cluster_arrive();
    cluster_wait();
    for (int first = mine; first < items; first += THREADS * TEAM) {
        const Item item(first, items);
        const WarpSums& block = *reinterpret_cast<const WarpSums*>(rings);
        finish(item, merged<TEAM>(TEAM, [&](int r) -> Partial {
            const float2 part = load2_at(address_in(&of_block[item.row], r));
            return {load4_at(address_in(&block[item.row][4 * item.quad], r)), part.x, part.y};
        }));
    }
    cluster_arrive();  // no block ends while another reads its shared memory
#endif

    // Merge the clusters. Of all blocks of a rank, the block that ends last does it.
    if (teams > 1 && 32 * rank < items) {
        u32* counter = counters + (STREAM ? piece.block : piece.group * TEAM + rank);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == u32(teams - 1);
        __syncthreads();
        if (last) {
            __threadfence();
            for (int first = mine; first < items; first += THREADS * TEAM) {
                const Item item(first, items);
                output.store(share, item, merged<4>(teams, [&](int t) -> Partial {
                                 return parts.load(t, item);
                             }));
            }
            if (threadIdx.x == 0) *counter = 0;
        }
    }
    if (rank == 0 && (teams == 1 || last)) output.pad(share);
#if __CUDA_ARCH__ >= 900 && CLUSTER > 1
    cluster_wait();
#endif
}

// Grid: (n_head_kv * row groups, shares). The kv heads of a row group are neighbours. Where the
// device has clusters, CLUSTER neighbouring shares are a cluster; shares are a multiple of CLUSTER.
// With STREAM the grid is (blocks, 1), and each block has a piece of the tiles of n_groups groups.
// With REGIONS row groups are numbered from sequence to sequence.
// Block: WARPS * 32 threads (at least 64). Shared memory: WARPS Rings and the stored queries.
// scratch, with several shares: float [grid.x][shares][GROUP_ROWS][HEAD_DIM + 2], with STREAM
// [blocks][2][GROUP_ROWS][HEAD_DIM + 2].
// counters: grid.x * CLUSTER.
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, WARPS > 4 ? 1 : 2)
    attention_decode(u8* dst, const float* q, const u16* k, const u16* v, const u16* mask,
                     u8* scratch, u32* counters, const int* regions, const u8* known,
                     const float* sinks, i64 n_tokens, i64 n_head, i64 n_head_kv, i64 n_kv,
                     i64 n_regions, i64 least, i64 most, float scale, i64 quantised,
                     i64 n_groups, i64 piece) {
    pdl_trigger();
    const More more = {regions, known, sinks, n_regions, least, most};
    const Attention all = {dst,      q,      k,         v,    mask,  scratch,        counters, more,
                           n_tokens, n_head, n_head_kv, n_kv, scale, bool(quantised)};
#if STREAM
    pdl_wait();
    for (Pieces pieces(n_groups, int((n_kv + 15) / 16), piece); pieces.there(); pieces.next()) {
        all.attend(pieces.own());
        __syncthreads();  // the next piece uses the same shared memory
    }
#else
    all.attend({int(blockIdx.x), 0, 0, int(blockIdx.y), int(gridDim.y), 0});
#endif
}

#else

// Goes through all tiles, with all warps of the block.
template <bool CAREFUL>
DEVICE void gather(Rows<SETS>& rows, Ring& ring, Tiles& tiles, Asked asked,
                   const int (&mask_row)[SETS]) {
    int entry = 0;
    for (int done = 0; done < asked.n; done++) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // all copies have arrived; no thread reads the earlier tile any more
        ask(asked, ring, entry == 0 ? STAGES - 1 : entry - 1, tiles);
        rows.template add<CAREFUL>(ring[entry], mask_row, SKIP < 3 || asked.masked >> entry & 1);
        entry = entry == STAGES - 1 ? 0 : entry + 1;
    }
    copies_wait<0>();
    __syncthreads();
}

// Computes one group of rows, over all its cells or over a piece of them.
DEVICE void Attention::attend(const Piece& piece) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = int(n_head) / int(n_head_kv);
    const int head_kv = piece.group % u32(n_head_kv), number = piece.group / u32(n_head_kv);
#if REGIONS
    if (!STREAM) pdl_wait();
    const Tokens own(more, int(n_tokens), number, group, GROUP_ROWS);
    if (own.tile < 0) return;
#else
    const Tokens own(int(n_tokens), number);
#endif
    float* const to = reinterpret_cast<float*>(dst) + i64(own.token) * n_head * HEAD_DIM;
    const float* const from = q + i64(own.token) * n_head * HEAD_DIM;
    const i64 skipped = own.cell * n_head_kv * HEAD_DIM;
    const Share share(head_kv, group, own.tile * GROUP_ROWS, GROUP_ROWS, own.count * group);
    const u8* known = more.known + (own.token + share.token) * known_stride(n_kv);
    const Cells cells(k + skipped, v + skipped, mask + own.token * n_kv, n_head_kv, n_kv, share);
    Ring& ring = *reinterpret_cast<Ring*>(memory);
    int mask_row[2];
#pragma unroll
    for (int s = 0; s < 2; s++)
        mask_row[s] = share.token_of(16 * warp + 8 * s + lane % 8) - share.token;
    if (!REGIONS && !STREAM) pdl_wait();

    const int first = STREAM ? piece.first : 0;
    Tiles tiles(cells, known, first, 1);
    if (STREAM) tiles.end = min(tiles.end, piece.end);
    Asked asked = start(ring, tiles);
    Rows<2> rows;
    u8* stored = memory + sizeof(Ring) + warp * Rows<2>::STORED_BYTES;
    uint2* queries = reinterpret_cast<uint2*>(stored);
    rows.template load<1>(from, share, 16 * warp, int(n_head), scale, queries, 0);
    rows.clear();
    gather<false>(rows, ring, tiles, asked, mask_row);
    if (__syncthreads_or(rows.suspicious())) {
        Tiles again(cells, known, first, 1);
        if (STREAM) again.end = min(again.end, piece.end);
        asked = start(ring, again);
        rows.clear();
        gather<true>(rows, ring, again, asked, mask_row);
    }
    rows.add_weights();
    const Parts<GROUP_ROWS> parts(scratch, piece, 1);
    const bool whole = !STREAM || piece.shares == 1;
#pragma unroll
    for (int s = 0; s < 2; s++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int row = 16 * warp + 8 * s + lane % 4 * 2 + j;
            if (row >= share.count) continue;
            float weight = rows.weight[s][j], keep = 1;
            const i64 head = i64(share.token_of(row)) * n_head + share.head_of(row);
            float* at = to + head * HEAD_DIM + lane / 4;
            if (whole) {
                if (SINKS) add_sink(more.sinks, share.head_of(row), rows.most[s][j], weight, keep);
            } else {
                const i64 part = parts.entry(piece.share) * GROUP_ROWS + row;
                at = reinterpret_cast<float*>(parts.sums + part * QUADS) + lane / 4;
                if (lane < 4) parts.weights[part] = make_float2(rows.most[s][j], weight);
            }
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int c = 16 * d + 8 * half;
                    const float sum = rows.sums[d][s][2 * half + j];
                    if (c >= HEAD_DIM) continue;
                    at[c] = !whole ? sum : weight == 0 ? 0.f : __fdividef(sum * keep, weight);
                }
            }
        }
    }
#if STREAM
    if (whole) return;
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    u32* counter = counters + piece.block;
    if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == u32(piece.shares - 1);
    __syncthreads();
    if (!last) return;
    __threadfence();
    const Output output{reinterpret_cast<u8*>(to), more.sinks, n_head, false};
    const int items = share.count * QUADS;
    for (int at = 32 * warp; at < items; at += THREADS) {
        const Item item(at, items);
        output.store(share, item, merged<4>(piece.shares, [&](int part) -> Partial {
                         return parts.load(part, item);
                     }));
    }
    if (threadIdx.x == 0) *counter = 0;
#endif
}

// Grid: (row groups, n_head_kv). A kv head has n_tokens * n_head / n_head_kv rows; a group has 16
// WARPS of them. With STREAM the grid is (blocks, 1), and each block has a piece of the tiles of
// n_groups groups; scratch and counters are then as for attention_decode. With REGIONS each
// sequence has its own groups.
// Block: WARPS * 32 threads. Shared memory: a Ring and the stored queries of every warp.
extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 4 ? 1 : 2)
    attention_prefill(u8* dst, const float* q, const u16* k, const u16* v, const u16* mask,
                      u8* scratch, u32* counters, const int* regions, const u8* known,
                      const float* sinks, i64 n_tokens, i64 n_head, i64 n_head_kv, i64 n_kv,
                      i64 n_regions, i64 least, i64 most, float scale, i64 n_groups, i64 piece) {
    pdl_trigger();
    const More more = {regions, known, sinks, n_regions, least, most};
    const Attention all = {dst,      q,      k,         v,    mask,  scratch, counters, more,
                           n_tokens, n_head, n_head_kv, n_kv, scale, false};
#if STREAM
    pdl_wait();
    const int tiles = int((n_kv + TILE_CELLS - 1) / TILE_CELLS);
    for (Pieces pieces(n_groups, tiles, piece); pieces.there(); pieces.next()) {
        all.attend(pieces.own());
        __syncthreads();  // the next piece uses the same shared memory
    }
#else
    all.attend({int(blockIdx.x * u32(n_head_kv) + blockIdx.y), 0, 0, 0, 1, 0});
#endif
}

#endif
