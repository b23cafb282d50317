// How the numbers of an input line become a tuning.
GemmWgmmaTuning wgmma_tuning(const Tuning& t) {
    GemmWgmmaTuning w;
    if (!t.given()) return w;
    // tokens, groups, stage units, stages, splits (-1: a pair), blocks an SM, raster, sharing + 10 * least units
    w = {t.v[0], t.v[1], t.v[2], t.v[3], t.v[4], t.v[5], t.v[6], t.v[7] / 10, t.v[7] % 10};
    return w;
}
GemmMmaTuning mma_tuning(const Tuning& t) {
    if (!t.given()) return {};
    return {t.v[0], t.v[1], t.v[2], t.v[3], t.v[4], t.v[5], t.v[6]};
}
