// Products with few tokens (decode), fused with the ops after them into one launch. multiply.cuh
// has the product and its macros.
//
//   product_plain   up to three weights ("segments") of one x, each with its own dst; biases
//   product_glu     segments gate and up; biases; silu(gate) * up, as floats or (GLU_Q8) as Q8_ACT
//   product_norm    one weight; bias; the residual add; the sums of squares of the result; the
//                   result times the norm's weight, as floats or (NORM_Q8) as Q8_ACT
//
// EPILOGUE chooses the kernel: 0 plain, 2 glu, 3 norm (1: product_qkv.cu).
//
// GLU_Q8 needs all 32 columns of a group in one block. The block makes them in PASSES. A pass
// requests the first loads of the next pass once all its own loads are in flight.
//
// product_norm makes half of a norm. The other half, the scale of a row, needs the whole row. The
// next products apply the scale to their results (SCALED). So no kernel waits for a sum over
// blocks.
//
// Versions (us of a token of an 8B model with Q4_0 weights as a graph, 66 norms, H100;
// data/results/tuning/norms-1.txt):
//   the norm as a launch, 1024 threads           2034
//   the norm as a launch, 512 or 256 threads     2181, 2254: they start early, and block the next
//                                                product
//   the norm in the product's last block         2190
//   half a norm here, half in the next product   2011 (2024 without), by the host's clock 2121
//                                                (2241): kept
// % of the read bandwidth (data/results/tuning/product-*.csv):
//   glu in one pass of 64 lines                  up to 16 points less: the blocks are too large
#include "multiply.cuh"
#include "quantise.cuh"

#if !defined(EPILOGUE) || EPILOGUE == 0
// The end of product_plain.
struct Plain {
    Segment at;
    i64 rows;
    int first, n_tokens;
    DEVICE const u8* weight(int) const { return at.w; }
    DEVICE i64 row(int line) const { return min(i64(first + line), rows - 1); }
    DEVICE void before() {}
    DEVICE void after() {}
    DEVICE void store(const LineSums& sum) const {
        for (int i = threadIdx.x; i < LINES * N; i += THREADS) {
            const int line = i % LINES, t = i / LINES;
            const i64 row = first + line;
            if (row < rows && t < n_tokens)
                reinterpret_cast<float*>(at.dst)[t * rows + row] = at.biased(sum(line, t), row);
        }
    }
};

// Arguments: dst, w, bias (or 0) and rows of three segments (rows 0: no segment), x, cols,
// n_tokens, squares, eps (both with SCALED).
extern "C" __global__ void LIMITS product_plain(SEGMENT(0), SEGMENT(1), SEGMENT(2),
                                                GIVEN_ARGUMENTS) {
    pdl_trigger();
    const Segment all[3] = SEGMENTS;
    Plain end;
    const int s = find(all, &end.at, &end.first);
    end.rows = end.at.rows, end.n_tokens = int(n_tokens);
    multiply_segment(s, end, GIVEN);
}
#endif

#if !defined(EPILOGUE) || EPILOGUE == 2
// The end of product_glu. Lines 2 c and 2 c + 1 of a block are gate and up of one column of dst.
struct Glu {
    Segment gate, up;
    i64 rows;
    int first, n_tokens;  // first: column of dst
    DEVICE const u8* weight(int line) const { return line % 2 ? up.w : gate.w; }
    DEVICE i64 row(int line) const { return min(i64(first + line / 2), rows - 1); }
    DEVICE void before() {}
    DEVICE void after() {}
    DEVICE float value(const LineSums& sum, int c, int t) const {
        const float g = gate.biased(sum(2 * c, t), first + c);
        return silu_times(g, up.biased(sum(2 * c + 1, t), first + c));
    }
    DEVICE void store(const LineSums& sum) const {
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

// Arguments: dst, w_gate, bias_gate (or 0), w_up, bias_up (or 0), rows (with GLU_Q8 a multiple of
// 32), then as product_plain from x on.
extern "C" __global__ void LIMITS product_glu(u8* dst, const u8* w_gate, const float* bias_gate,
                                              const u8* w_up, const float* bias_up, i64 rows,
                                              GIVEN_ARGUMENTS) {
    pdl_trigger();
    Glu end = {{dst, w_gate, bias_gate, rows}, {dst, w_up, bias_up, rows}, rows,
               int(blockIdx.x) * (LINES / 2), int(n_tokens)};
    multiply_lines<TYPE_0>(end, GIVEN);
}
#endif

#if !defined(EPILOGUE) || EPILOGUE == 3
// The end of product_norm. A thread has one line of one token. A warp has 32 neighbouring lines,
// and sums their squares and quantises them together.
struct Normed {
    Segment at;  // dst: (n_tokens, rows) float32, or with NORM_Q8 Q8_ACT rows
    i64 rows;
    int first, n_tokens;
    float *sum, *squares;
    const float *residual_rows, *factors;
    float residual, factor;

    DEVICE const u8* weight(int) const { return at.w; }
    DEVICE i64 row(int line) const { return min(i64(first + line), rows - 1); }
    DEVICE int line() const { return threadIdx.x % LINES; }
    DEVICE int token() const { return threadIdx.x / LINES; }
    DEVICE bool mine() const { return first + line() < rows && token() < n_tokens; }
    DEVICE void before() { factor = mine() ? __ldg(factors + first + line()) : 0.f; }
    DEVICE void after() {
        residual = mine() ? residual_rows[token() * rows + first + line()] : 0.f;
    }
    DEVICE void store(const LineSums& product) const {
        static_assert(LINES % 32 == 0 && LINES * N <= THREADS, "not a warp for 32 lines");
        if (token() >= n_tokens || first + line() / 32 * 32 >= rows) return;  // whole warps
        const int c = first + line(), t = token();
        const float v = __fadd_rn(at.biased(product(line(), t), c), residual);
        sum[t * rows + c] = v;
        const float square = square_sum32(v);
        if (c % 32 == 0) squares[t * (rows / SQUARES) + c / SQUARES] = square;
        const float weighted = __fmul_rn(v, factor);
#ifdef NORM_Q8
        u8* to = at.dst + t * act_row_bytes(rows);
        quantise32(to, rows, c / 32 * 32, weighted);
        if (blockIdx.x == 0) {
            for (int i = threadIdx.x % 32; i < 64; i += 32) zero_padding(to, rows, i);
        }
#else
        reinterpret_cast<float*>(at.dst)[t * rows + c] = weighted;
#endif
    }
};

// Arguments: dst, w, bias (or 0), rows (a multiple of 32), sum (n_tokens, rows), squares (n_tokens,
// rows / 32), residual (n_tokens, rows), factors (rows), then as product_plain from x on.
extern "C" __global__ void LIMITS product_norm(u8* dst, const u8* w, const float* bias, i64 rows,
                                               float* sum, float* sums_of_squares,
                                               const float* residual, const float* factors,
                                               GIVEN_ARGUMENTS) {
    pdl_trigger();
    Normed end = {{dst, w, bias, rows}, rows, int(blockIdx.x) * LINES, int(n_tokens), sum,
                  sums_of_squares, residual, factors, 0.f, 0.f};
    multiply_lines<TYPE_0>(end, GIVEN);
}
#endif
