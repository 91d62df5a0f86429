// Units of weights of every type, with the activations that they are multiplied with: one step of a
// product of few tokens (multiply.cuh).
//
// Units<W> has
//   width                    weights of a unit
//   bytes                    of a unit in the first plane, which is `quants(planes)`
//   planes(w, rows, cols)    as in kernels/weights.cuh, and so are fetch, expand and add
//   act_planes(x, cols)      the planes of the activations of the first token
//   acts(planes, at, u, v)   activations for unit u + v, of the token `at` bytes after the first
// Activations are Q8_ACT for quantised weights, else float. With NARROW a unit of float weights is
// a single weight, for cols that are no multiple of 8.
//
// Measured as part of the product (multiply.cuh). Versions of a unit were compared by instructions
// and registers, not by time.
#pragma once
#include "weights.cuh"

template <class W>
struct QuantisedUnits : W {  // a unit has 32 weights
    static constexpr int width = 32, bytes = 16;
    using typename W::Planes;
    static DEVICE const u8* quants(const Planes& p) { return p.q; }
    struct ActPlanes {
        const u8 *q, *scale, *sums;
    };
    static DEVICE Planes planes(const u8* w, i64 rows, i64 cols) {
        return W::planes(w, rows * cols / W::block);
    }
    static DEVICE ActPlanes act_planes(const u8* x, i64 cols) {
        return {x, x + cols, x + cols + cols / 8};
    }
    static DEVICE Acts acts(const ActPlanes& p, int at, int u, int v) {
        const int4* q = reinterpret_cast<const int4*>(p.q + (at + (u + v) * 32));
        return {q[0], q[1], *reinterpret_cast<const float*>(p.scale + (at + (u + v) * 4)),
                *reinterpret_cast<const short2*>(p.sums + (at + (u + v) * 4))};
    }
};

template <class W>
struct Units : QuantisedUnits<W> {};

// MXFP4 with 12 added to the doubled weights; the start value of dot_unit subtracts it again.
//
// A byte permutation looks the weights up. Where bit 3 of a selector is set, the permutation copies
// the sign of the byte that it picks; that is 0 in a table of bytes below 128. So a code is looked
// up twice: among the positive weights with its sign bit, and among the negative weights with its
// sign bit inverted. One of both results is 0, and `or` joins them. This takes fewer instructions
// than a choice by the sign. The high four weights come first, because registers would spill
// otherwise where the limit is 128.
template <>
struct Units<MXFP4> : QuantisedUnits<MXFP4> {
    static DEVICE int four(u32 codes, u32 inverted) {  // weights of the low 16 bits
        return permute(0x0f0e0d0cu, 0x18141210u, codes) |
               permute(0x090a0b0cu, 0x00040608u, inverted);
    }
    static DEVICE MXFP4::Ints expand(const MXFP4::Raw& r, int) {
        MXFP4::Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 low = word(r.q, i), high = low >> 16;
            w.q[2 * i + 1] = four(high, high ^ 0x8888u);
            w.q[2 * i] = four(low, low ^ 0x8888u);
        }
        w.d = MXFP4::scale(r.e);
        return w;
    }
    static DEVICE float add(const MXFP4::Ints& w, const Acts& x, float sum) {
        const int start = -12 * (x.sums.x + x.sums.y);
        return fmaf(__fmul_rn(w.d, x.scale), float(dot_unit(w.q, x, start)), sum);
    }
};

template <>
struct Units<Q8_0> {  // a unit is half a block
    static constexpr int width = 16, bytes = 16;
    using Planes = Q8_0::Planes;
    static DEVICE const u8* quants(const Planes& p) { return p.q; }
    struct Raw {
        uint4 q;
        u16 d;
    };
    struct Ints {
        int q[4];
        float d;
    };
    struct Acts {
        int4 q;
        float scale;
    };
    struct ActPlanes {
        const u8 *q, *scale;
    };
    static DEVICE Planes planes(const u8* w, i64 rows, i64 cols) {
        return Q8_0::planes(w, rows * cols / 32);
    }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return {stream16(p.q + i64(u + v) * 16), load_u16(p.s + i64((u >> 1) + v / 2) * 2)};
    }
    static DEVICE Ints expand(const Raw& r, int) {
        return {{int(r.q.x), int(r.q.y), int(r.q.z), int(r.q.w)}, half_to_float(r.d)};
    }
    static DEVICE ActPlanes act_planes(const u8* x, i64 cols) { return {x, x + cols}; }
    static DEVICE Acts acts(const ActPlanes& p, int at, int u, int v) {
        return {*reinterpret_cast<const int4*>(p.q + (at + (u + v) * 16)),
                *reinterpret_cast<const float*>(p.scale + (at + ((u >> 1) + v / 2) * 4))};
    }
    static DEVICE float add(const Ints& w, const Acts& x, float sum) {
        return fmaf(__fmul_rn(w.d, x.scale), float(dot_half(w.q, x.q, 0)), sum);
    }
};

template <class W>
struct Floats {
    struct Planes {
        const u8* w;
    };
    static DEVICE const u8* quants(const Planes& p) { return p.w; }
    struct ActPlanes {
        const u8* x;
    };
#ifdef NARROW
    static constexpr int width = 1, bytes = W::bytes;
    using Raw = float;
    using Ints = float;
    using Acts = float;
    static DEVICE Raw fetch(const Planes& p, int u, int v) { return W::value(p.w, 0, i64(u) + v); }
    static DEVICE Ints expand(const Raw& r, int) { return r; }
    static DEVICE Acts acts(const ActPlanes& p, int at, int u, int v) {
        return *reinterpret_cast<const float*>(p.x + (at + (u + v) * 4));
    }
    static DEVICE float add(float w, float x, float sum) { return fmaf(w, x, sum); }
#else
    static constexpr int width = 8, bytes = 8 * W::bytes;
    using Raw = typename W::Raw;
    struct Ints {
        float f[8];
    };
    struct Acts {
        float4 a, b;
    };
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return W::load8(p.w + i64(u + v) * 8 * W::bytes);
    }
    static DEVICE Ints expand(const Raw& r, int) {
        Ints w;
        W::decode8(r, w.f);
        return w;
    }
    static DEVICE Acts acts(const ActPlanes& p, int at, int u, int v) {
        const float4* x = reinterpret_cast<const float4*>(p.x + (at + (u + v) * 32));
        return {x[0], x[1]};
    }
    static DEVICE float add(const Ints& w, const Acts& x, float sum) {
        const float v[8] = {x.a.x, x.a.y, x.a.z, x.a.w, x.b.x, x.b.y, x.b.z, x.b.w};
#pragma unroll
        for (int k = 0; k < 8; k++) sum = fmaf(w.f[k], v[k], sum);
        return sum;
    }
#endif
    static DEVICE Planes planes(const u8* w, i64, i64) { return {w}; }
    static DEVICE ActPlanes act_planes(const u8* x, i64) { return {x}; }
};
template <>
struct Units<F32> : Floats<F32> {};
template <>
struct Units<F16> : Floats<F16> {};
template <>
struct Units<BF16> : Floats<BF16> {};

template <class W>
DEVICE i64 x_row_bytes(i64 cols) {
    return Units<W>::width == 32 || Units<W>::width == 16 ? act_row_bytes(cols) : 4 * cols;
}
