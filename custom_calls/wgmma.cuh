// Thin wrappers around the instructions of sm_90a: products of a warpgroup, registers
// that change hands, boxes of tensor maps, what blocks of a cluster tell each other.

#ifndef KDTREE_JAX_WGMMA_CUH_
#define KDTREE_JAX_WGMMA_CUH_

#include <cuda.h>

#include <cstdint>

#include "bulk_copy.cuh"

namespace kdtree_jax {

// How an operand lies in shared memory: rows of 128 bytes, 8 rows to a pattern in which
// the 16-byte pieces of row r are exchanged by r. Such a pattern must begin at a
// multiple of its size.
struct Operand {
  uint32_t low, high;

  // `bytes` further on, a multiple of 16.
  __device__ __forceinline__ Operand At(uint32_t bytes) const {
    return {low + bytes / 16, high};
  }
};

// Patterns follow each other along rows. `column_stride` is from one to the next along
// columns, where there are several.
__device__ __forceinline__ Operand Swizzled128(uint32_t shared,
                                               uint32_t column_stride = 16) {
  return {(shared & 0x3ffff) >> 4 | column_stride >> 4 << 16, 1024 >> 4 | 1u << 30};
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending groups of products are under way.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Results of products, to stand after a wait for them: no use of them moves before it.
template <int kCount>
__device__ __forceinline__ void KeepBehind(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// First operands in registers, to stand after a wait for the products that read them:
// nothing else comes into these registers before it.
template <int kCount>
__device__ __forceinline__ void KeepUntilHere(const uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
  }
}

// The registers of d, as operands of an instruction and in its text.
#define KDT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KDT_D16(i) KDT_D4(i), KDT_D4(i + 4), KDT_D4(i + 8), KDT_D4(i + 12)
#define KDT_OF_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
  "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define KDT_OF_64 \
  KDT_OF_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"

// d [64, 64] = a [64, 16] b [16, 64], or += where `add`; rows of k in either operand.
__device__ __forceinline__ void Wgmma(float (&d)[32], Operand a, Operand b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %36, 0;\n"
      "mov.b64 a, {%32, %33};\nmov.b64 b, {%34, %35};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KDT_OF_32
      "}, a, b, add, 1, 1, 0, 0;\n}"
      : KDT_D16(0), KDT_D16(16)
      : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(static_cast<int>(add)));
}

// The same with a in registers, in the fragments of mma.sync. They must stay until the
// end of the product, which neither the compiler nor the hardware sees to: KeepUntilHere.
__device__ __forceinline__ void Wgmma(float (&d)[32], const uint32_t (&a)[4], Operand b,
                                      bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %38, 0;\n"
      "mov.b64 b, {%36, %37};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KDT_OF_32
      "}, {%32, %33, %34, %35}, b, add, 1, 1, 0;\n}"
      : KDT_D16(0), KDT_D16(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high),
        "r"(static_cast<int>(add)));
}

// The same with b in rows of columns, one row for each k.
__device__ __forceinline__ void WgmmaByKey(float (&d)[32], const uint32_t (&a)[4],
                                           Operand b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %38, 0;\n"
      "mov.b64 b, {%36, %37};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" KDT_OF_32
      "}, {%32, %33, %34, %35}, b, add, 1, 1, 1;\n}"
      : KDT_D16(0), KDT_D16(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high),
        "r"(static_cast<int>(add)));
}

// The same for d [64, 128] and b [16, 128].
__device__ __forceinline__ void WgmmaByKey(float (&d)[64], const uint32_t (&a)[4],
                                           Operand b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %70, 0;\n"
      "mov.b64 b, {%68, %69};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KDT_OF_64
      "}, {%64, %65, %66, %67}, b, add, 1, 1, 1;\n}"
      : KDT_D16(0), KDT_D16(16), KDT_D16(32), KDT_D16(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high),
        "r"(static_cast<int>(add)));
}

#undef KDT_D4
#undef KDT_D16
#undef KDT_OF_32
#undef KDT_OF_64

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// What this thread wrote to shared memory is seen by products and bulk copies.
__device__ __forceinline__ void FenceForProducts() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A warp's arrival at the barrier of block `rank` of the cluster that lies where this
// block has `barrier`.
__device__ __forceinline__ void ArriveAsWarpAt(uint32_t barrier, uint32_t rank) {
  __syncwarp();
  if (threadIdx.x % 32 >= kArrivingLanes) return;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Copies the box of a tensor map whose first element is (i0, i1, i2, i3).
__device__ __forceinline__ void CopyBox4(uint32_t shared, const CUtensorMap* map,
                                         int i0, int i1, int i2, int i3,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier)
      : "memory");
}

// The same with a policy for the L2.
__device__ __forceinline__ void CopyBox4(uint32_t shared, const CUtensorMap* map,
                                         int i0, int i1, int i2, int i3,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier), "l"(policy)
      : "memory");
}

// The same with five coordinates.
__device__ __forceinline__ void CopyBox5(uint32_t shared, const CUtensorMap* map,
                                         int i0, int i1, int i2, int i3, int i4,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4), "r"(barrier)
      : "memory");
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_WGMMA_CUH_
