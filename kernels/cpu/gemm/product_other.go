//go:build !amd64

package gemm

import "unsafe"

// Here all forms are those of packWords, packWide and packPairs.

func (p *Product) packForm(unsafe.Pointer, *side)      { panic(p.kernels.form) }
func (p *Product) tileStrip(area, unsafe.Pointer, int) { panic(p.kernels.form) }

func (p *Product) rowTiles(area) (rows, cols int) { return 0, 0 }
