//go:build !gpukernels

package images

import "embed"

var files embed.FS // empty: builds with the tag gpukernels embed compiled kernels
