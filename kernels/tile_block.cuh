// One block of tensor_product.cu: its constants and its part of the results. tensor_product.cu has
// the macros and the figures.
#pragma once
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
#define THREADS (32 * WM)       // threads that multiply
#define LOADERS (32 * LOADING)  // threads that load, after them
#define LOADER (threadIdx.x - THREADS)
#define WEIGHTS (1 + GATED)             // weights of a tile
#define BLOCK_ROWS (16 * WM / WEIGHTS)  // rows of each weight in a block, and so columns of dst

#include "staged.cuh"

#define CLUSTERS (CLUSTERED && K_PARTS > 1 && __CUDA_ARCH__ >= 900)

static_assert(WM % 4 == 0, "warpgroups are whole");

constexpr int X_STEP = TOKENS * 256;  // bytes of 128 columns of activations
constexpr int X_BYTES = STEPS * X_STEP, W_BYTES = WEIGHTS * Stage<TYPE>::SIZE;  // bytes of a stage
// Shared memory: activations of all stages, weights of all stages, barriers, and a flag.
constexpr int W_AT = STAGES * X_BYTES, FULL_AT = W_AT + STAGES * W_BYTES;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8, LAST_AT = EMPTY_AT + STAGES * 8;
constexpr int GROUPS = TOKENS / 8;
constexpr bool BULK = __CUDA_ARCH__ >= 900;  // copies of any size, by one thread

static_assert(STAGES < 8, "128 bytes hold the barriers");

// A thread's sums: four for each 8 tokens.
using Accumulators = float[GROUPS][4];

// The first of a lane's two rows in the block. The second is 8 rows later, or with gate and up the
// same row of the other weight.
DEVICE u32 row_of() { return threadIdx.x / 32 * (16 / WEIGHTS) + threadIdx.x % 32 / 4; }

struct Segment {
    float* dst;
    const u8* w;
    const float* bias;
    i64 rows;
    DEVICE u32 tiles() const { return (u32(rows) + BLOCK_ROWS - 1) / BLOCK_ROWS; }
};

// The part of the results that a block computes: BLOCK_ROWS rows of `segment` from row0 on, and
// TOKENS tokens from `token` on. Of the stages of these rows it takes `count`, from stage `first`
// on: part `number` of K_PARTS. `tile` counts the tiles of all segments.
struct Part {
    Segment segment;
    u32 row0, token, first, count, number, tile;
    DEVICE Part(const Segment& s0, const Segment& s1, const Segment& s2, u32 units,
                u32 token_tiles) {
        const u32 stages = (units + UNITS - 1) / UNITS;
        tile = blockIdx.x / K_PARTS, number = blockIdx.x % K_PARTS;
        token = tile % token_tiles * TOKENS;
        first = stages * number / K_PARTS, count = stages * (number + 1) / K_PARTS - first;
        u32 rows = tile / token_tiles;  // the tile of rows, among all segments; then in its segment
        segment = s0;
        if (!GATED && rows >= s0.tiles()) {
            rows -= s0.tiles(), segment = s1;
            if (rows >= s1.tiles()) rows -= s1.tiles(), segment = s2;
        }
        row0 = rows * BLOCK_ROWS;
    }
};
