package level

import "golang.org/x/sys/cpu"

// cpuid executes CPUID.
//
//go:noescape
func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)

// xgetbv returns the low half of XCR0, the register states that the system saves.
func xgetbv() (eax uint32)

func detect() (Level, [features]bool) {
	var has [features]bool
	x := &cpu.X86
	_, _, ecx1, _ := cpuid(1, 0)
	f16c := ecx1&(1<<29) != 0
	if !x.HasAVX2 || !x.HasFMA || !f16c {
		return Portable, has
	}
	if !x.HasAVX512F || !x.HasAVX512BW || !x.HasAVX512DQ || !x.HasAVX512VL {
		return AVX2, has
	}
	has[AVX512VNNI] = x.HasAVX512VNNI
	has[AVX512BF16] = x.HasAVX512BF16
	_, vendor, _, _ := cpuid(0, 0)
	const auth = 'A' | 'u'<<8 | 't'<<16 | 'h'<<24 // AuthenticAMD
	has[FastBF16] = x.HasAVX512BF16 && vendor == auth
	_, _, _, edx7 := cpuid(7, 0)
	const bf16, tile, int8, states = 1 << 22, 1 << 24, 1 << 25, 3 << 17
	if edx7&tile != 0 && edx7&(bf16|int8) != 0 && xgetbv()&states == states && permitTiles() {
		has[AMXBF16] = edx7&bf16 != 0
		has[AMXInt8] = edx7&int8 != 0
	}
	return AVX512, has
}
