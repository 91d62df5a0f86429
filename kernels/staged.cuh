// Copies of quantised weights to shared memory, in the planes of kernels/weights.cuh.
//
// A *stage* is STEPS steps of 4 units of each of BLOCK_ROWS rows. Every plane of a type has a part
// of the stage: for each row CHUNKS aligned words of 16 bytes, which hold the bytes of the row's
// units. These bytes may begin anywhere in the first word. Copies always have 16 bytes. A word that
// holds any byte of the tensor can be read whole, because tensors begin on multiples of 16.
//
// The includer defines BLOCK_ROWS and STEPS, and the threads that copy: LOADERS of them, of which
// this thread is number LOADER.
//
// Versions (times: tensor_product.cu): weights straight to registers; through shared memory, copied
// by the warps that multiply; copied by separate warps: kept.
#pragma once
#include "halves.cuh"
#include "tensor_core.cuh"

constexpr int UNITS = 4 * STEPS;  // of a row, in a stage

// Starts a copy of 16 bytes of weights to shared memory, or of zeros unless `there`. Only copies of
// weights have an L2 prefetch size. tests/backend/cuda/ptx.py recognises by it the reads that may
// come before pdl_wait.
DEVICE void copy_weights(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// planes -----------------------------------------------------------------------------------------

// The planes of each type, in order. Plane p has bytes[p] for every per[p] units. `read` loads a
// unit from its planes; at.word<p>() is the unit's address in plane p.
template <class W>
struct Planes;

template <class T>
DEVICE T take(const u8* p) {
    return *reinterpret_cast<const T*>(p);
}

template <>
struct Planes<Q4_0> {
    static constexpr int count = 2, bytes[] = {16, 2}, per[] = {1, 1};
    template <class At>
    static DEVICE Q4_0::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<u16>(at.template word<1>())};
    }
};
template <>
struct Planes<Q8_0> {
    static constexpr int count = 2, bytes[] = {32, 2}, per[] = {1, 1};
    template <class At>
    static DEVICE Q8_0::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint4>(at.template word<0, 1>()),
                take<u16>(at.template word<1>())};
    }
};
template <>
struct Planes<MXFP4> {
    static constexpr int count = 2, bytes[] = {16, 1}, per[] = {1, 1};
    template <class At>
    static DEVICE MXFP4::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<u8>(at.template word<1>())};
    }
};
template <>
struct Planes<Q4_K> {
    static constexpr int count = 2, bytes[] = {16, 16}, per[] = {1, 8};
    template <class At>
    static DEVICE Q4_K::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint4>(at.template word<1>())};
    }
};
template <>
struct Planes<Q5_K> {
    static constexpr int count = 3, bytes[] = {16, 4, 16}, per[] = {1, 1, 8};
    template <class At>
    static DEVICE Q5_K::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint4>(at.template word<2>()),
                take<u32>(at.template word<1>())};
    }
};
template <>
struct Planes<Q6_K> {
    static constexpr int count = 4, bytes[] = {16, 8, 2, 2}, per[] = {1, 1, 1, 8};
    template <class At>
    static DEVICE Q6_K::Raw read(const At& at) {
        return {take<uint4>(at.template word<0>()), take<uint2>(at.template word<1>()),
                take<u16>(at.template word<2>()), take<u16>(at.template word<3>())};
    }
};

// Plane P of type W: the addresses of units in the tensor, and the plane's part of a stage.
template <class W, int P>
struct Plane {
    static constexpr int BYTES = Planes<W>::bytes[P], PER = Planes<W>::per[P];
    // The first unit of a row in a stage is a multiple of GRAIN, and its address one of ALIGN.
    static constexpr int GRAIN = W::block == 256 ? (UNITS < 8 ? UNITS : 8) : 1;
    static constexpr int PITCH = PER > 1 ? BYTES : BYTES * GRAIN;
    static constexpr int ALIGN = PITCH % 16 == 0 ? 16 : PITCH & -PITCH;
    static constexpr int LENGTH = BYTES * (UNITS > PER ? UNITS / PER : 1);
    static constexpr int CHUNKS = (LENGTH + 31 - ALIGN) / 16;
    static constexpr int SIZE = BLOCK_ROWS * CHUNKS * 16;

    static DEVICE i64 at(u32 unit) { return i64(unit / PER) * BYTES; }

    // Permutes the words of a row, so that the 8 lanes of a phase (2 rows of 4 units) read 8
    // different groups of banks.
    static DEVICE u32 chunk(u32 row, u32 c) {
        if constexpr (BYTES == 32) return c ^ (row & 1);
        if constexpr (BYTES == 16 && PER == 1 && CHUNKS > 4) return c ^ (row & 1) * 4;
        return c;
    }

    // Requests the plane's part of the stage that begins at unit u0 of row row0. Rows past the last
    // get zeros, and so do whole words past the end of a row. Nothing is read for these, so their
    // addresses may have any value.
    static DEVICE void request(u32 to, const u8* plane, u32 units, u32 row0, u32 rows, u32 u0) {
        const u32 last = min(u0 + UNITS, units) - 1;
        if constexpr (ALIGN == 16 && LOADERS % CHUNKS == 0 && BLOCK_ROWS * CHUNKS % LOADERS == 0) {
            constexpr u32 PASS = LOADERS / CHUNKS;  // a thread has the same word of every row
            const u32 r = LOADER / CHUNKS, c = LOADER % CHUNKS;
            const bool inside = at(u0) + c * 16 < at(last) + BYTES;
            const u32 there = inside && row0 < rows ? rows - row0 : 0;  // rows that have it
            const u8* from = plane + at((row0 + r) * units + u0) + c * 16;
            const i64 stride = at(PASS * units);
#pragma unroll
            for (u32 k = 0; k < BLOCK_ROWS; k += PASS) {
                const u32 lies = PASS % 2 ? chunk(r + k, c) : chunk(r, c);
                const u32 word = to + (r * CHUNKS + lies + k * CHUNKS) * 16;
                copy_weights(word, from, r + k < there);
                from += stride;
            }
        } else {
            const u32 pitch = u32(at(units)), first = u32(at(u0)), end = u32(at(last)) + BYTES;
#pragma unroll
            for (u32 k = 0; k < (BLOCK_ROWS * CHUNKS + LOADERS - 1) / LOADERS; k++) {
                const u32 i = LOADER + k * LOADERS, r = i / CHUNKS, c = i % CHUNKS;
                if (BLOCK_ROWS * CHUNKS % LOADERS && i >= BLOCK_ROWS * CHUNKS) break;
                const i64 row = i64(row0 + r) * pitch;
                const u32 rest = u32(row) & 15, word = ((rest + first) & ~15u) + c * 16;
                const bool there = row0 + r < rows && word < rest + end;
                const u8* from = plane + row - rest + word;
                copy_weights(to + (r * CHUNKS + chunk(r, c)) * 16, from, there);
            }
        }
    }
};

// All planes of a type, which lie one after another, both in the tensor and in a stage.
template <class W, int P = 0>
struct Stage {
    static constexpr int SIZE = Plane<W, P>::SIZE + Stage<W, P + 1>::SIZE;
    static DEVICE void request(u32 to, const u8* plane, u32 units, u32 row0, u32 rows, u32 u0) {
        using First = Plane<W, P>;
        using Rest = Stage<W, P + 1>;
        First::request(to, plane, units, row0, rows, u0);
        Rest::request(to + First::SIZE, plane + First::at(rows * units), units,
                                      row0, rows, u0);
    }
};
template <class W>
struct Stage<W, Planes<W>::count> {
    static constexpr int SIZE = 0;
    static DEVICE void request(u32, const u8*, u32, u32, u32, u32) {}
};

template <class W, int P>
constexpr int plane_offset() {
    if constexpr (P == 0) return 0;
    else return plane_offset<W, P - 1>() + Plane<W, P - 1>::SIZE;
}

// The addresses of unit `unit` of row `row` in a stage. `first`: the unit of the tensor with which
// the row begins in this stage.
template <class W>
struct At {
    const u8* stage;
    u32 row, unit, first;

    template <int P, int HALF = 0>
    DEVICE const u8* word() const {
        using T = Plane<W, P>;
        const u8* part = stage + plane_offset<W, P>() + row * (T::CHUNKS * 16);
        if constexpr (T::PER == 1 && T::BYTES % 16 == 0)
            return part + T::chunk(row, unit * (T::BYTES / 16) + HALF) * 16;
        else if constexpr (T::ALIGN == 16)
            return part + unit / T::PER * T::BYTES;
        else
            return part + (u32(T::at(first)) & 15) + u32(T::at(first + unit) - T::at(first));
    }
};
