module github.com/spillway-ml/spillway/kernels/cpu/asmgen

go 1.26

require (
	github.com/mmcloughlin/avo v0.6.0
	golang.org/x/tools v0.38.0
)
