//go:build gpukernels

package images

import "embed"

//go:embed packed/*.tar.zst
var files embed.FS
