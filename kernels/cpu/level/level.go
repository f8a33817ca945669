// Package level says which SIMD instructions the kernels of the CPU device use.
//
// A kernel gives the same bits at every level; a level changes its speed alone.
// The environment variable SPILLWAY_SIMD (portable, avx2 or avx512) lowers the
// level, for tests and for finding faults. A value that names no level, or one
// that this CPU lacks, is an error that Err returns: a program that starts
// kernels checks it once and refuses to go on, since the bits it asked to check
// would not be the bits it got.
package level

import (
	"fmt"
	"os"
	"strings"
)

// Level is a set of instructions that kernels may use. A higher level
// includes the lower ones.
type Level int

// The levels, in increasing order.
const (
	Portable Level = iota // plain Go
	AVX2                  // AVX2, FMA, F16C
	AVX512                // AVX-512 F, BW, DQ, VL, and all of AVX2
)

var names = [...]string{Portable: "portable", AVX2: "avx2", AVX512: "avx512"}

func (l Level) String() string {
	if l < 0 || int(l) >= len(names) {
		return fmt.Sprintf("Level(%d)", int(l))
	}
	return names[l]
}

// Parse returns the level of that name, in any case.
func Parse(name string) (Level, error) {
	for l, n := range names {
		if strings.EqualFold(n, name) {
			return Level(l), nil
		}
	}
	return Portable, fmt.Errorf("level: no SIMD level %q; levels are %s", name, strings.Join(names[:], ", "))
}

// Feature is an extension that kernels use where it exists. None belongs to a
// level; each needs the level that its comment names.
type Feature int

// The features.
const (
	AVX512VNNI Feature = iota // VPDPBUSD on 512 bits; AVX512
	AVX512BF16                // VDPBF16PS, VCVTNE2PS2BF16; AVX512
	FastBF16                  // VDPBF16PS at the rate of VFMADDPS, as on AMD: Intel's is a quarter of it, slower than float32; AVX512
	AMXBF16                   // TDPBF16PS, with the system's permission to use tiles; AVX512
	AMXInt8                   // TDPBUSD, TDPBSSD, with that permission; AVX512
	features
)

// Env is the environment variable that lowers the level.
const Env = "SPILLWAY_SIMD"

var (
	best    Level // of this CPU
	current Level
	has     [features]bool // at the current level
	err     error
)

func init() {
	var cpu [features]bool
	best, cpu = detect()
	current, err = choose(os.Getenv(Env), best)
	has = cpu
	for f, needs := range map[Feature]Level{AVX512VNNI: AVX512, AVX512BF16: AVX512, FastBF16: AVX512, AMXBF16: AVX512, AMXInt8: AVX512} {
		has[f] = cpu[f] && current >= needs
	}
}

// choose returns the level to use on a CPU whose best level is given, when the
// environment asks for want ("" asks for nothing).
func choose(want string, best Level) (Level, error) {
	if want == "" {
		return best, nil
	}
	l, err := Parse(want)
	if err != nil {
		return best, fmt.Errorf("%s: %w", Env, err)
	}
	if l > best {
		return best, fmt.Errorf("%s: level: this CPU has no %s; its best level is %s", Env, l, best)
	}
	return l, nil
}

// Current returns the level that kernels use: the CPU's best, or the lower one
// that the environment names. Where Err is not nil it is the CPU's best.
func Current() Level { return current }

// Best returns the highest level of this CPU.
func Best() Level { return best }

// Has reports whether the CPU has the feature and the current level includes
// what the feature needs.
func Has(f Feature) bool { return f >= 0 && f < features && has[f] }

// Err returns what is wrong with the environment's level, or nil.
func Err() error { return err }
