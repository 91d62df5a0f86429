// tensor_product: dst (n_tokens, rows) = x (n_tokens, cols) times w (rows, cols) transposed, plus a
// bias, for a few tokens up to some hundred: quantised weights are read once, decoded in registers
// and multiplied on tensor cores.
//
// With weights as rows of mma.m16n8k16 and tokens as its columns, a lane needs 2 times 4 columns of
// rows g and g + 8 (g = lane / 4). Which columns is free, as long as activations are in the same
// order. So a lane takes a unit of 32 weights as it lies and, decoded, that is its fragments of 8
// mma; halves.cuh says what the order is, dequantise.cu puts activations into it.
//
// Both come through shared memory by cp.async, STAGES deep: weights as in the file (staged.cuh),
// activations with 16-byte word c of token n at c ^ 4 (n % 2), so that 8 lanes read 8 different
// bank groups. A block is WM warps along rows; a warp has TILES tiles of 16 rows, which share each
// fragment of activations, for all tokens of the block. A stage is STEPS * 128 columns.
//
// The stages of all tiles of results, row after row of tiles, are one sequence, of which every
// block has an equal part, so that no multiprocessor waits for a last wave; copies run ahead from
// one tile into the next. A tile of more than one block is summed by the last of them, in order of
// the columns. What a result is made of depends on shapes and the grid alone.
//
// Macros: TYPE, TOKENS (of a block: 8, 16, 32, 64 or 128), TILES, WM, STEPS, STAGES, BLOCKS (of an
// SM, which bounds registers). workbench/backend/cuda_gemm.py chooses them and the grid.
//
// Arguments: dst, w, x (F16, halves.cuh's order), bias (or 0), partial (F32, two tiles of TOKENS x
// ROWS for every block; used by tiles that blocks share), counters (u32, one for each block, zero;
// zero again afterwards), rows, cols (a multiple of the type's block), n_tokens, stride (elements
// from one token's results to the next). Block 32 WM. Grid (blocks, 1), at most one for each stage
// of each tile. Dynamic shared memory: the stages.
//
// Reasons, and what was tried (one H100 80GB HBM3; ms of the products of a step of an 8B model with
// Q4_0 weights, which memory needs 1.27 ms for; at 128 tokens tensor cores need 2.42):
//   * Weights from memory to registers, one stage ahead, four warps along columns, up to 8 blocks
//     along the columns of a tile: 3.15 at 16 tokens, 3.96 at 32, 5.70 at 64, 9.76 at 128. A stage
//     of 16 tokens took 4200 cycles where its instructions need 1900: loads had one stage to
//     arrive, at 64 tokens a quarter of one, and 40 moves passed them on. Copies to shared memory
//     need neither registers nor moves, and may be several stages ahead.
//   * This one, the best build for each number of tokens: 2.24 at 5 to 8 tokens, 2.56 at 16, 3.31 at
//     32, 4.46 at 64, 7.31 at 128, 12.6 at 256 (cuBLAS on expanded weights: 11.3 at 64, 11.7 at
//     128, 13.2 at 256, 16.4 at 512). One tile of rows a warp is best up to 32 tokens (TILES 2:
//     2.63, 2.66, 3.35), two from 64 on (TILES 1: 4.77); three blocks a multiprocessor at 64
//     tokens: 5.49, one with longer stages: 4.46.
//   * TILES 2 halves what is read from shared memory: with one tile, its 128 bytes a clock feed
//     1024 products a clock, which is about what mma.sync can do.
//   * Masks as constants: a move before every use, 58 instructions for 16 x 32 weights and 16
//     tokens; 45 with masks in registers (halves.cuh).
//   * 128 tokens a block: every register and 24 to 32 bytes of spills; blocks of 64 replace it.
//   * Integers (mma.m16n8k32) straight on the quants, counted but not run: decoding is a quarter of
//     the instructions, but scaling the sums of every 32 columns takes 12 for each 8 tokens, where
//     here loading and multiplying take 3: even at 16 tokens, worse beyond.
//   * Scales on the sums instead of the weights: impossible in this order, one mma has 4 blocks of
//     a row in it; in the order of the file a lane would read 4 bytes at a time.
#ifndef TYPE
#define TYPE Q4_0
#define TOKENS 16
#define TILES 2
#define WM 4
#define STEPS 2
#define STAGES 3
#define BLOCKS 2
#endif

#define THREADS (32 * WM)
#define ROWS (16 * TILES * WM)

#include "staged.cuh"

constexpr int WORDS = 16 * STEPS;  // of 16 bytes: a token's part of a stage
constexpr int X_BYTES = TOKENS * WORDS * 16;
constexpr int STAGE_BYTES = X_BYTES + Stage<TYPE>::SIZE;  // activations first
constexpr int GROUPS = TOKENS / 8;

// tensor cores and copies ------------------------------------------------------------------------

DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Asks for the activations of a stage: tokens `token` and following, columns from `column` on.
// Zeros for tokens past the last and columns past the row.
DEVICE void request_x(u32 to, const u16* x, int n_tokens, int token, u32 row_halves, u32 column) {
    constexpr int PASS = THREADS / WORDS;  // even: a thread's words all have the same place
    static_assert(PASS % 2 == 0 || TOKENS == PASS, "tokens of a thread alternate");
    const u32 c = threadIdx.x % WORDS, first = threadIdx.x / WORDS;
    const u16* from = x + i64(token + first) * row_halves + column + 8 * c;
    to += (first * WORDS + (c ^ (first % 2 * 4))) * 16;
    const bool inside = column + 8 * c < row_halves;
#pragma unroll
    for (int k = 0; k < TOKENS; k += PASS) {
        if (TOKENS < PASS && first >= TOKENS) break;
        const bool there = inside && token + int(first) + k < n_tokens;
        copy_async(to + k * WORDS * 16, from, there);
        from += i64(PASS) * row_halves;
    }
}

// work and results -------------------------------------------------------------------------------

// A place in the sequence of stages: which tile of results, which of its stages. Rows of tiles are
// the slower index: blocks with the same weights are neighbours.
struct Position {
    int tile, stage, row0, token;
    DEVICE Position(int at, int stages, int token_tiles) : tile(at / stages), stage(at % stages) {
        place(token_tiles);
    }
    DEVICE void place(int token_tiles) {
        row0 = tile / token_tiles * ROWS, token = tile % token_tiles * TOKENS;
    }
    DEVICE bool next(int stages, int token_tiles) {  // true when it leaves a tile
        if (++stage < stages) return false;
        stage = 0, tile++;
        place(token_tiles);
        return true;
    }
};

struct Sequence {
    int total;  // stages of all tiles
    DEVICE int begin(int block) const { return int(i64(total) * block / gridDim.x); }
    DEVICE int block(int at) const { return int((i64(at + 1) * gridDim.x - 1) / total); }
};

struct Result {
    float* dst;
    const float* bias;
    i64 rows, n_tokens, stride;
};

using Sums = float[TILES][GROUPS][4];

// Keeps the compiler from working out all addresses of a loop before the first is used.
DEVICE void apart(float*& at) { asm volatile("" : "+l"(at)); }

DEVICE void store(const Result& to, const Position& p, const Sums& acc) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 row = p.row0 + (threadIdx.x / 32 * TILES + m) * 16 + lane / 4 + 8 * half;
            if (row >= to.rows) continue;
            const float b = to.bias ? __ldg(to.bias + row) : 0.f;
            const i64 first = p.token + lane % 4 * 2;
            float* at = to.dst + first * to.stride + row;
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                if (first + 8 * n < to.n_tokens) at[0] = acc[m][n][2 * half] + b;
                if (first + 8 * n + 1 < to.n_tokens) at[to.stride] = acc[m][n][2 * half + 1] + b;
                at += 8 * to.stride;
                apart(at);
            }
        }
    }
}

// Puts this block's sums of a tile beside those of the others that have a part of it. True in the
// last of them, which then has the sum of all. A block's own first tile is in the first of its two
// places, a tile it only begins in the second.
DEVICE bool combine(const Sequence& all, const Position& p, int stages, Sums& acc, float* partial,
                    u32* counters, int first, int last) {
    __shared__ bool is_last;
    const int start = p.tile * stages;
    const auto place = [&](int block) {
        const int at = 2 * block + (all.begin(block) < start);
        return reinterpret_cast<float4*>(partial) + i64(at) * (TILES * GROUPS * THREADS) +
               threadIdx.x;
    };
    float4* own = place(blockIdx.x);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const float(&c)[4] = acc[m][n];
            own[(m * GROUPS + n) * THREADS] = make_float4(c[0], c[1], c[2], c[3]);
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(counters + first, 1u) == u32(last - first);
        if (is_last) counters[first] = 0;
    }
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    for (int block = first; block <= last; block++) {
        const float4* from = place(block);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const float4 v = from[(m * GROUPS + n) * THREADS];
                float(&c)[4] = acc[m][n];
                if (block == first) c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
                else c[0] += v.x, c[1] += v.y, c[2] += v.z, c[3] += v.w;
            }
        }
    }
    return true;
}

// Ends this block's part of a tile; sums begin at zero again.
DEVICE void finish(const Sequence& all, const Position& p, int stages, Sums& acc, float* partial,
                   u32* counters, const Result& to) {
    const int first = all.block(p.tile * stages), last = all.block(p.tile * stages + stages - 1);
    const bool whole =
        first == last || combine(all, p, stages, acc, partial, counters, first, last);
    if (whole) store(to, p, acc);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
#pragma unroll
            for (int k = 0; k < 4; k++) acc[m][n][k] = 0;
        }
    }
}

// the kernel -------------------------------------------------------------------------------------

// Adds a stage's products. `units` are those of a row; steps past the end repeat its last unit,
// for which x is 0.
DEVICE void add_stage(Sums& acc, const u8* stage, u32 units, u32 row0, u32 u0, Masks masks) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u8* words = stage + (g * WORDS + t) * 16;
    const u8* weights = stage + X_BYTES;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const u32 unit = min(u32(4 * s + t), units - 1 - u0), number = (u0 + unit) % 8;
        decltype(Planes<TYPE>::read(At<TYPE>{})) raw[TILES][2];
        typename Halves<TYPE>::Factors by[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 row = (threadIdx.x / 32 * TILES + m) * 16 + g + 8 * r;
                raw[m][r] =
                    Planes<TYPE>::read(At<TYPE>{weights, row, unit, (row0 + row) * units + u0});
                by[m][r] = Halves<TYPE>::factors(raw[m][r], number);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[TILES][2][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                Halves<TYPE>::pairs(raw[m][0], number, by[m][0], i, a[m][0], masks);
                Halves<TYPE>::pairs(raw[m][1], number, by[m][1], i, a[m][1], masks);
            }
            const u8* from = words + ((s * 4 + i) ^ (g % 2)) * 64;
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const uint4 b = take<uint4>(from + n * 8 * WORDS * 16);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const u32(&lo)[4] = a[m][0];
                    const u32(&hi)[4] = a[m][1];
                    multiply(acc[m][n], lo[0], hi[0], lo[1], hi[1], b.x, b.y);
                    multiply(acc[m][n], lo[2], hi[2], lo[3], hi[3], b.z, b.w);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    tensor_product(float* dst, const u8* w, const u16* x, const float* bias, float* partial,
                   u32* counters, i64 n_rows, i64 cols, i64 n_tokens, i64 stride) {
    extern __shared__ __align__(128) u8 shared[];
    pdl_trigger();
    const u32 units = u32(cols / 32), row_halves = (units + 3) / 4 * 128, rows = u32(n_rows);
    const int stages = int((units + UNITS - 1) / UNITS), tokens = int(n_tokens);
    const int token_tiles = (tokens + TOKENS - 1) / TOKENS;
    const Sequence all = {int((rows + ROWS - 1) / ROWS) * token_tiles * stages};
    const int begin = all.begin(blockIdx.x), end = all.begin(blockIdx.x + 1);
    const u32 base = shared_address(shared);

    Position ahead(begin, stages, token_tiles), now = ahead;
    // weights are on their way to L2 while the kernel before may still write the activations
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) {
        if (begin + k < end) {
            Stage<TYPE>::request<true>(0, w, units, ahead.row0, rows, ahead.stage * UNITS);
            ahead.next(stages, token_tiles);
        }
    }
    pdl_wait();
    ahead = now;
    const auto request = [&](int slot) {
        const u32 to = base + slot * STAGE_BYTES;
        request_x(to, x, tokens, ahead.token, row_halves, ahead.stage * (STEPS * 128));
        Stage<TYPE>::request<false>(to + X_BYTES, w, units, ahead.row0, rows,
                                    ahead.stage * UNITS);
        ahead.next(stages, token_tiles);
    };
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) {
        if (begin + k < end) request(k);
        copies_commit();
    }

    const Result result = {dst, bias, n_rows, n_tokens, stride};
    const Masks masks(u32(n_tokens >> 32));
    Sums acc = {};
    int slot = 0;
#pragma unroll 1
    for (int at = begin; at < end; at++) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // this stage is there, and all have left the one before
        if (at + STAGES - 1 < end) request(slot == 0 ? STAGES - 1 : slot - 1);
        copies_commit();
        add_stage(acc, shared + slot * STAGE_BYTES, units, now.row0, now.stage * UNITS, masks);
        slot = slot + 1 == STAGES ? 0 : slot + 1;

        if (now.stage + 1 == stages || at + 1 == end)
            finish(all, now, stages, acc, partial, counters, result);
        now.next(stages, token_tiles);
    }
    copies_wait<0>();
}
