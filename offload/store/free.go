package store

import "github.com/spillway-ml/spillway/internal/filesys"

// Free is how many bytes the filesystem of a folder has free for everybody, of the
// nearest folder above one that is not there yet; 0 where nobody can say, or for "".
func Free(dir string) int64 {
	if dir == "" {
		return 0
	}
	room, _ := filesys.RoomAt(filesys.System, dir)
	return room.Free
}
