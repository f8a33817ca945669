package checkpoint

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Blob is a small file of a checkpoint.
type Blob struct {
	Name string
	Data []byte
}

// writeRest writes blobs and the manifest into a folder that already has its ranks' files,
// synced, and syncs all of it.
func writeRest(in filesys.Folder, m Manifest, parts []File, blobs []Blob) (Manifest, error) {
	m.Version, m.Files = Version, slices.Clone(parts)
	m.Tensors = slices.Clone(m.Tensors)
	slices.SortFunc(m.Tensors, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	for _, b := range blobs {
		if err := writeSynced(in, b.Name, b.Data); err != nil {
			return m, err
		}
		m.Files = append(m.Files, File{Name: b.Name, Bytes: int64(len(b.Data)), CRC32C: sum(b.Data)})
	}
	if err := m.check(); err != nil {
		return m, err
	}
	text, err := m.text()
	if err != nil {
		return m, err
	}
	if len(text) > maxManifest {
		return m, fmt.Errorf("its manifest has %d bytes; at most %d are read again", len(text), maxManifest)
	}
	if err := writeSynced(in, manifestName, text); err != nil {
		return m, err
	}
	return m, in.Sync()
}

func writeSynced(in filesys.Folder, name string, data []byte) error {
	return filesys.WriteSynced(in, name, data, 0o666)
}
