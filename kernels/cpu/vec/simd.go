package vec

import "github.com/spillway-ml/spillway/kernels/cpu/level"

// table has the assembly of one SIMD level. A nil entry means that the Go code
// serves that level too.
type table struct{}

// tables are filled by init on processors that have assembly.
var tables [level.AVX512 + 1]table

// simd is the table in use.
var simd = &tables[level.Current()]
