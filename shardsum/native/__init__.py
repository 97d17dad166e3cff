"""The native library: what it is made of (:mod:`.recipe`), building it (:mod:`.builder`), keeping it (:mod:`.cache`),
finding and loading it (:mod:`.loader`)."""
