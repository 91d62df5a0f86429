// Products with a few tokens (decode) and what follows them, one launch each; multiply.cuh has the
// product and its macros.
//
//   product_plain   up to three weights ("segments") of one x, each to its own dst, plus its bias
//   product_glu     segments gate and up; biases; silu(gate) * up, as floats or (GLU_Q8) as Q8_ACT
//   product_norm    one weight; bias; the residual add; the sum's squares; the sum times a row, the
//                   norm's weight, as floats or (NORM_Q8) as Q8_ACT
//
// EPILOGUE is the one kernel wanted: 0 plain, 2 glu, 3 norm (1 is product_qkv.cu's).
//
// GLU_Q8 needs all 32 columns of a group in one block, which makes them in PASSES. Each pass
// requests the next one's first loads once its own are all in flight.
//
// product_norm makes half of a norm. The other half, the scale of a row, needs the whole row. The
// products that read the row apply the scale to their results (SCALED), so nothing waits for a sum
// over blocks.
//
// Versions (H100; us of a token of an 8B model with Q4_0 weights as a graph, 66 norms;
// data/results/tuning/norms-1.txt, product-*.csv):
//   glu in one pass of 64 lines            up to 16 points of bandwidth lost: blocks too large
//   the norm as a launch, 1024 threads     2034
//   the same, 512 or 256 threads           2181, 2254: they start early, and block the next product
//   the norm in the product's last block   2190
//   half a norm here, SCALED behind        2011 for 2024, by the host's clock 2121 for 2241: kept
#include "multiply.cuh"
#include "quantise.cuh"

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

// Arguments: dst, w, bias (or 0), rows of three segments (rows 0: none), x, cols, n_tokens,
// squares, eps (with SCALED).
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
// Lines 2 c and 2 c + 1 are gate and up of one column of dst.
struct Glu {
    Segment gate, up;
    i64 rows;
    int first, n_tokens;  // first: column of dst
    DEVICE const u8* weight(int line) const { return line % 2 ? up.w : gate.w; }
    DEVICE i64 row(int line) const { return min(i64(first + line / 2), rows - 1); }
    DEVICE void before() {}
    DEVICE void after() {}
    DEVICE float value(const Sums& sum, int c, int t) const {
        const float g = gate.biased(sum(2 * c, t), first + c);
        return silu_times(g, up.biased(sum(2 * c + 1, t), first + c));
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

// Arguments: dst, w_gate, bias_gate (or 0), w_up, bias_up (or 0), rows, then as product_plain from
// x on. With GLU_Q8 rows are a multiple of 32.
extern "C" __global__ void LIMITS product_glu(u8* dst, const u8* w_gate, const float* bias_gate,
                                              const u8* w_up, const float* bias_up, i64 rows,
                                              GIVEN_ARGUMENTS) {
    pdl_trigger();
    Glu end = {{dst, w_gate, bias_gate, rows}, {dst, w_up, bias_up, rows}, rows,
               int(blockIdx.x) * (LINES / 2), int(n_tokens)};
    multiply<TYPE_0>(end, GIVEN);
}
#endif

#if !defined(EPILOGUE) || EPILOGUE == 3
// A thread has one line of one token. A warp has 32 neighbouring lines: their squares are summed
// and they are quantised together.
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
    DEVICE void store(const Sums& product) const {
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
    multiply<TYPE_0>(end, GIVEN);
}
#endif
